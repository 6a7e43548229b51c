"""Copying from the context: what followed the last occurrence of the latest tokens is proposed again. The context is the
prompt and the output; for an encoder-decoder the source and the output.

Costs nothing and needs no second model (Leviathan 3.6; "prompt lookup decoding"). Deterministic, hence a point mass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.draft_length.base import Prospect
from outrider.drafters.copying import CopyDrafter, CopyState, copy_prospect
from outrider.errors import ParameterError
from outrider.proposal import DraftRow


@dataclass
class _Index(CopyState):
    """Where each n-gram of the row was last followed by something: {n-gram: position after it}; how far that goes."""

    seen: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0


class PromptLookupDrafter(CopyDrafter):
    """Matches the last `max_ngram` tokens, or fewer down to `min_ngram`, with their latest earlier occurrence.

    The copy may run into itself, so that a repeating pattern is continued for as long as asked.
    """

    name = "prompt-lookup"

    def __init__(self, max_ngram: int = 8, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ParameterError(f"min_ngram must be in 1 … max_ngram = {max_ngram}, got {min_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def _start(self, drawn: float) -> _Index:
        return _Index(drawn)

    def prospects(self, row: DraftRow) -> list[Prospect]:
        """Proposals fare alike by the length of the match."""
        return [copy_prospect(self.name, self._match(row)[1], row.state.drawn)]

    def _continue(self, row: DraftRow, limit: int) -> list[int]:
        source, length = self._match(row)
        tokens = row.reading
        copied: list[int] = []
        for at in range(source, source + limit) if length else ():
            copied.append(tokens[at] if at < len(tokens) else copied[at - len(tokens)])
        return copied

    def _match(self, row: DraftRow) -> tuple[int, int]:
        """The position after the latest earlier occurrence of the row's end, and the length of the match; (0, 0) if none."""
        index: _Index = row.state
        tokens = row.reading
        self._extend(index, tokens, len(tokens) - row.uncertain)
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            source = index.seen.get(tuple(tokens[-n:]))
            if source is not None:
                return source, n
        return 0, 0

    def _extend(self, index: _Index, tokens: list[int], certain: int) -> None:
        """Index the n-grams that end before each certain position not seen yet; the end itself has no continuation."""
        for after in range(max(index.indexed, 1), certain):
            for n in range(self.min_ngram, min(self.max_ngram, after) + 1):
                index.seen[tuple(tokens[after - n : after])] = after
        index.indexed = max(index.indexed, certain)
