"""What drafts cost on an engine that keeps the width of its passes: changes of the width, and tokens filled in.

A draft widens its round's pass, which takes a change; the plain rounds after it are filled up for a while, and then the
width changes back. So the cost falls on other rounds than the draft's own, and how much there is depends on how the text
goes: it is followed round by round, by the engine's own rule, and shared out among the drafted rounds.
"""

from __future__ import annotations

from outrider.costs import Costs
from outrider.models.openvino.steady import NARROWEST, SteadyWidth

PRIOR_ROUNDS = 4.0  # drafted rounds that the guess weighs: that one in so many takes a change


class KeptWidths:
    """Of one row, as if it were alone. Nothing on engines where a change costs nothing."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._steady = SteadyWidth()
        self._last = NARROWEST  # plain decoding's
        self._steady.of(NARROWEST)
        self._seconds = costs.change
        self._rounds = PRIOR_ROUNDS

    def expected(self, drafted: int) -> float:
        """Seconds that a round with so many drafted tokens adds beyond its own pass, here or later."""
        return self._seconds / self._rounds if drafted + 1 > NARROWEST else 0.0

    def follow(self, drafted: int, context: int) -> float:
        """A round drafted so many: seconds of its pass beyond those that so many tokens take."""
        if not self._costs.change:
            return 0.0
        own = max(NARROWEST, drafted + 1)
        width = self._steady.of(own)
        extra = max(0.0, self._costs.verify(width, context) - self._costs.verify(own, context))
        extra += self._costs.change * (width != self._last)
        self._last = width
        self._seconds += extra
        self._rounds += drafted + 1 > NARROWEST
        return extra
