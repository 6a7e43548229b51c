"""Copying from the context: what followed the last occurrence of the latest tokens is proposed again.

Costs nothing and needs no second model (Leviathan 3.6; "prompt lookup decoding"). Deterministic, hence a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from outrider.device_data import pad_rows
from outrider.drafters.base import DraftContext, Drafter, DraftRow, Proposal, empty_proposal
from outrider.errors import ParameterError


@dataclass
class _Index:
    """Where each n-gram of the row was last followed by something: {n-gram: position after it}."""

    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class PromptLookupDrafter(Drafter):
    """Matches the last `max_ngram` tokens, or fewer down to `min_ngram`, with their latest earlier occurrence.

    The copy may run into itself, so that a repeating pattern is continued for as long as asked.
    """

    name = "prompt-lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ParameterError(f"min_ngram must be in 1 … max_ngram = {max_ngram}, got {min_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        del context
        for row in rows:
            row.state = _Index()

    def propose(
        self, rows: Many[DraftRow], limits: Many[int], uniforms: Many[Many[float]], context: DraftContext
    ) -> Proposal:
        del uniforms
        drafts = [self._continue(row, limit) for row, limit in zip(rows, limits, strict=True)]
        if not any(drafts):
            return empty_proposal(len(rows), context.device)
        tokens, lengths = pad_rows(drafts, context.device)
        return Proposal(tokens, lengths)

    def _continue(self, row: DraftRow, limit: int) -> list[int]:
        index: _Index = row.state
        tokens = row.tokens
        self._extend(index, tokens)
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            source = index.seen.get(tuple(tokens[-n:]))
            if source is not None:
                copied: list[int] = []
                for at in range(source, source + limit):
                    copied.append(tokens[at] if at < len(tokens) else copied[at - len(tokens)])
                return copied
        return []

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        """Index the n-grams that end before each position not seen yet; the one at the end has no continuation."""
        for after in range(max(index.indexed, 1), len(tokens)):
            for n in range(self.min_ngram, min(self.max_ngram, after) + 1):
                index.seen[tuple(tokens[after - n : after])] = after
        index.indexed = len(tokens)
