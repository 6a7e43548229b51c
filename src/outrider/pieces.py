"""Text as it comes: rounds to pieces of it, for `stream` and for a batch's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from outrider.records import Origin, Round, TopLogprobs
from outrider.support.text import TextTracker

T = TypeVar("T")


class Piece(str):
    """A piece of generated text.

    origin: where the token that completed it came from. tokens: the ids since the piece before. logprobs, top_logprobs: of
    these, as in `Result`, None unless asked for. What ends a text without being part of it, an end-of-sequence token say, is
    in no piece: the `Result` has it.
    """

    origin: Origin
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[TopLogprobs, ...] | None

    def __new__(
        cls,
        text: str,
        origin: Origin,
        tokens: Sequence[int] = (),
        logprobs: Sequence[float] | None = None,
        top_logprobs: Sequence[TopLogprobs] | None = None,
    ) -> Piece:
        piece = super().__new__(cls, text)
        piece.origin, piece.tokens = origin, tuple(tokens)
        piece.logprobs = None if logprobs is None else tuple(logprobs)
        piece.top_logprobs = None if top_logprobs is None else tuple(top_logprobs)
        return piece

    def __getnewargs__(self) -> tuple[object, ...]:  # type: ignore[override]
        return str(self), self.origin, self.tokens, self.logprobs, self.top_logprobs


class Pieces:
    """Of one text. tracker: that its tokens go to, which knows what of their text is certain."""

    def __init__(self, tracker: TextTracker) -> None:
        self._tracker = tracker
        self._origins: list[Origin] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] | None = None
        self._top_logprobs: list[TopLogprobs] | None = None
        self._given = 0  # tokens

    def add(self, record: Round) -> None:
        """A round of the text."""
        self._origins += record.origins
        self._tokens += record.tokens
        self._logprobs = _with(self._logprobs, record.logprobs)
        self._top_logprobs = _with(self._top_logprobs, record.top_logprobs)

    def take(self) -> Iterator[Piece]:
        """What has become certain since the last time."""
        for text, number in self._tracker.take():
            own = slice(self._given, number + 1)  # nothing, of a token whose text comes in two parts
            self._given = max(self._given, number + 1)
            told, top = self._logprobs and self._logprobs[own], self._top_logprobs and self._top_logprobs[own]
            yield Piece(text, self._origins[number], self._tokens[own], told, top)


def _with(known: list[T] | None, more: Sequence[T] | None) -> list[T] | None:
    """Both, None if there is nothing to tell."""
    if more is None:
        return known
    found = [] if known is None else known
    found += more
    return found
