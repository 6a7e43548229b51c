"""How often each kind of draft was tried, and when it may be tried again.

After each round of it that was wholly in vain, twice as late: a drafter that is never right costs next to nothing, and one
that turns good is noticed all the same.
"""

from __future__ import annotations

LONGEST_PAUSE = 32  # rounds

Kind = tuple[str, int]


class Tries:
    """Of one sequence, by drafter and kind of prospect."""

    def __init__(self) -> None:
        self._round = 0
        self._count: dict[Kind, int] = {}
        self._in_vain: dict[Kind, int] = {}
        self._last: dict[Kind, int] = {}

    def end_round(self) -> None:
        """A round is over."""
        self._round += 1

    def tried(self, kind: Kind, accepted: bool) -> None:
        """The round that is over drafted so; accepted: anything of it."""
        self._count[kind] = self.count(kind) + 1
        self._in_vain[kind] = 0 if accepted else self._in_vain.get(kind, 0) + 1
        self._last[kind] = self._round

    def count(self, kind: Kind) -> int:
        """How many rounds drafted so."""
        return self._count.get(kind, 0)

    def due(self, kind: Kind) -> bool:
        """Whether the pause after the last one is over."""
        pause = min(LONGEST_PAUSE, 2 ** self._in_vain.get(kind, 0))
        return kind not in self._last or self._round - self._last[kind] >= pause
