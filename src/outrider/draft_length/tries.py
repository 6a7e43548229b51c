"""How often each kind of draft was tried, and when it may be tried again.

After rounds of it that were wholly in vain, later and later: the pause is one over the probability that so many are, one
after the other, where a draft just pays for itself, until tries take a small share of the time. So a drafter that is never
right costs next to nothing, one that costs little and may well be right is not given up after a few bad guesses, and one
that turns good is noticed all the same.
"""

from __future__ import annotations

IN_VAIN = 0.015  # share of the time that tries of what is never right take in the end
LONGEST_PAUSES = (8.0, 32.0)  # rounds, of drafts that cost little and much
LEAST_WORTHWHILE = 0.25  # a round with a draft does a little more than the tables know

Kind = tuple[str, int]


class Tries:
    """By drafter and kind of prospect. rows: sequences whose rounds are counted."""

    def __init__(self, rows: int = 1) -> None:
        self._round, self.rows = 0, rows
        self._count: dict[Kind, int] = {}
        self._likely: dict[Kind, float] = {}  # so many in vain, where a draft just pays
        self._last: dict[Kind, int] = {}
        self._longest: dict[Kind, float] = {}  # pause

    def end_round(self) -> None:
        """A round is over."""
        self._round += 1

    def tried(self, kind: Kind, accepted: bool, worthwhile: float) -> None:
        """The round that is over drafted so.

        accepted: anything of it. worthwhile: the acceptance, in [0, 1], from which on such a draft pays, or what it costs in
        passes.
        """
        least, most = LONGEST_PAUSES
        self._longest[kind] = min(most, max(least, worthwhile / IN_VAIN))
        self._count[kind] = self.count(kind) + 1
        missed = self._likely.get(kind, 1.0) * (1.0 - max(LEAST_WORTHWHILE, worthwhile))
        self._likely[kind] = 1.0 if accepted else missed
        self._last[kind] = self._round

    def count(self, kind: Kind) -> int:
        """How many rounds drafted so."""
        return self._count.get(kind, 0)

    def pause(self, kind: Kind) -> float:
        """Rounds from the last try to the next."""
        return 1.0 / max(1.0 / self._longest.get(kind, 1.0), self._likely.get(kind, 1.0))

    def due(self, kind: Kind) -> bool:
        """Whether the pause after the last one is over."""
        return kind not in self._last or self._round - self._last[kind] >= self.pause(kind) * self.rows
