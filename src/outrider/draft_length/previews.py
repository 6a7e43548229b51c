"""Learning from proposals that were not made.

A copy is known before anything is drawn and costs next to nothing, so what it would have proposed can be compared with the
tokens that came instead. Such a token follows the target's law given all before it, so it equals the copy's with just the
probability with which the copy would have been accepted: for a point mass, the rate learned is the same as from real
drafts, and it is learned at every position, without a pass of the target being risked.

Only what is certain is compared, so whatever is decided from it can't bend the law (`draft_length.base`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

from outrider.draft_length.base import Finding, Prospect

HORIZON = 8
"""Tokens of a copy that are followed at most, unless more are drafted."""


@dataclass
class _Followed:
    prospect: Prospect
    expected: int | None
    rest: Iterator[int]
    start: int
    inside: bool
    place: int = 0


class Previews:
    """The proposals of one row that are being compared with its text."""

    def __init__(self) -> None:
        self._followed: list[_Followed] = []

    def add(self, prospect: Prospect, tokens: Iterable[int], start: int) -> None:
        """tokens: what would be proposed after `start` tokens of the row; read no further than they turn out right."""
        rest = iter(tokens)
        expected = next(rest, None)
        if expected is None:
            return
        inside = any(not f.inside and f.prospect.drafter == prospect.drafter for f in self._followed)
        self._followed.append(_Followed(prospect, expected, rest, start, inside))

    def compare(self, text: Many[int]) -> list[Finding]:
        """What the text, all of it certain, shows of them; proposals that went wrong or came to their end are dropped."""
        found: list[Finding] = []
        going_on = []
        for followed in self._followed:
            right = True
            while right and followed.expected is not None and followed.start + followed.place < len(text):
                right = text[followed.start + followed.place] == followed.expected
                again = followed.inside and followed.place > 0
                found.append(Finding(followed.prospect, followed.start, followed.place, right, again))
                followed.place += 1
                followed.expected = next(followed.rest, None) if right else None
            if followed.expected is not None:
                going_on.append(followed)
        self._followed = going_on
        return found
