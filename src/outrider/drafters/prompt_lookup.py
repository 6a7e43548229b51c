"""Copying from the context: what followed the last occurrence of the latest tokens is proposed again.

Costs nothing and needs no second model (Leviathan 3.6; "prompt lookup decoding"). Deterministic, hence a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from outrider.device_data import pad_rows
from outrider.drafters.base import DraftContext, Drafter, DraftRow, Proposal, empty_proposal
from outrider.errors import ParameterError

# Acceptance by the length of the match, first and later tokens, on HumanEval completions of SmolLM2-135M and
# Qwen2.5-Coder-1.5B (EXPERIMENTS.md); where the draft-length policy starts from.
PRIORS = {
    1: (0.28, 0.72),
    2: (0.5, 0.77),
    3: (0.68, 0.8),
    4: (0.8, 0.8),
    5: (0.83, 0.82),
    6: (0.86, 0.84),
    7: (0.88, 0.85),
}
LONGEST_PRIOR = (0.93, 0.95)


@dataclass
class _Index:
    """Where each n-gram of the row was last followed by something: {n-gram: position after it}.

    source, length: the longest match of the row's end, found when `indexed` tokens were known; length 0 without one.
    """

    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0
    source: int = 0
    length: int = 0


class PromptLookupDrafter(Drafter):
    """Matches the last `max_ngram` tokens, or fewer down to `min_ngram`, with their latest earlier occurrence.

    The copy may run into itself, so that a repeating pattern is continued for as long as asked.
    """

    name = "prompt-lookup"

    def __init__(self, max_ngram: int = 8, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ParameterError(f"min_ngram must be in 1 … max_ngram = {max_ngram}, got {min_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        del context
        for row in rows:
            row.state = _Index()

    def hint(self, row: DraftRow) -> int:
        """The length of the match, 0 for none."""
        return self._match(row).length

    def prior(self, hint: int) -> tuple[float, float]:
        return PRIORS.get(hint, LONGEST_PRIOR) if hint else (0.0, 0.0)

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
        index, tokens = self._match(row), row.tokens
        if index.length == 0:
            return []
        copied: list[int] = []
        for at in range(index.source, index.source + limit):
            copied.append(tokens[at] if at < len(tokens) else copied[at - len(tokens)])
        return copied

    def _match(self, row: DraftRow) -> _Index:
        """The row's index brought up to date, with the longest match of its end."""
        index: _Index = row.state
        tokens = row.tokens
        if index.indexed == len(tokens):
            return index
        self._extend(index, tokens)
        index.length = 0
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            source = index.seen.get(tuple(tokens[-n:]))
            if source is not None:
                index.source, index.length = source, n
                break
        return index

    def _extend(self, index: _Index, tokens: list[int]) -> None:
        """Index the n-grams that end before each position not seen yet; the one at the end has no continuation."""
        for after in range(max(index.indexed, 1), len(tokens)):
            for n in range(self.min_ngram, min(self.max_ngram, after) + 1):
                index.seen[tuple(tokens[after - n : after])] = after
        index.indexed = len(tokens)
