"""What drafts cost on an engine that keeps the width of its passes: changes of the width, and tokens filled in.

A draft widens its round's pass, which takes a change; the plain rounds after it are filled up for a while, and then the
width changes back. So the cost falls on other rounds than the draft's own: it is followed round by round, by the engine's
own rule. What is ahead is reckoned by the width that a draft has itself.
"""

from __future__ import annotations

from outrider.costs import Costs
from outrider.models.steady_width import NARROWEST, SteadyWidth

# Changes reckoned to a round that makes one and is the only one to draft for a while, as copies are: there and back, and
# what is filled in before it goes back. And to one of many in a row, which share the change (EXPERIMENTS.md).
CHARGED, SHARED = 2.5, 0.4
# What a narrower pass is filled up with counts by this share: a round that drafts as much as is kept anyhow keeps it up, and
# a long draft, made once, made drafts of its length look free from then on.
FILLED = 0.2


class KeptWidths:
    """Of one row, as if it were alone. Nothing on engines where a change costs nothing."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._steady = SteadyWidth()
        self._last = self._steady.of(NARROWEST)  # plain decoding's

    def expected(self, drafted: int, context: int, lasting: float = 0.0) -> float:
        """Seconds beyond those of its own tokens to reckon with, should the next round draft so many.

        lasting: how sure it is, from 0 to 1, that the rounds after it will draft as well.
        """
        if not self._costs.change:
            return 0.0
        own, changes = _own(drafted), CHARGED + lasting * (SHARED - CHARGED)
        return FILLED * self._filled(own, self._steady.peek(own), context) + changes * self._costs.change * (
            own > self._last
        )

    def follow(self, drafted: int, context: int) -> float:
        """A round drafted so many. → what its pass took beyond its own tokens"""
        if not self._costs.change:
            return 0.0
        own = _own(drafted)
        width = self._steady.of(own)
        extra = self._filled(own, width, context) + self._costs.change * (width != self._last)
        self._last = width
        return extra

    def _filled(self, own: int, width: int, context: int) -> float:
        return max(0.0, self._costs.verify(width, context) - self._costs.verify(own, context))


def _own(drafted: int) -> int:
    return max(NARROWEST, drafted + 1)
