"""What rounds teach: how often drafts of a kind are right, tokens that look alike, alternatives; what was tried and lost.

Of one text; or of texts side by side, whose rows then need not learn each for itself what the others know.
"""

from __future__ import annotations

from outrider.costs import SharedCosts
from outrider.draft_length.account import Account
from outrider.draft_length.base import TESTS, Prospect
from outrider.draft_length.beside import Beside
from outrider.draft_length.rates import Rate
from outrider.draft_length.tries import Tries
from outrider.draft_steps.signals import PRIORS

OFFERED = 0.1  # share of a row's rounds with something to offer, before it is known: if it were 1, each row of a batch would
# begin as if all of them drafted when it does


class Learned:
    """memory: decisions after which an old one counts 1/e. account: of the time. costs: of passes as they are now, by all
    rows that are left. rows: that learn together.
    """

    def __init__(self, memory: float, account: Account, costs: SharedCosts, rows: int = 1) -> None:
        self.account = account
        self.costs = costs
        self.tries = Tries(rows)
        self.offered = Rate(OFFERED, TESTS, memory)
        self._memory = memory
        self._rates: dict[tuple[str, int], tuple[Rate, Rate]] = {}
        self._signals: dict[tuple[str, int], Rate] = {}
        self._alternatives: dict[str, Beside] = {}

    def share(self, costs: SharedCosts) -> None:
        """Passes are shared by another number of rows from now on."""
        self.costs = costs
        self.tries.rows = costs.costs.rows

    def of(self, prospect: Prospect) -> tuple[Rate, Rate]:
        """Of its first token, and of later ones."""
        key = (prospect.drafter, prospect.kind)
        if key not in self._rates:
            self._rates[key] = (self._rate(prospect.first, prospect), self._rate(prospect.later, prospect))
        return self._rates[key]

    def of_signal(self, prospect: Prospect, signal: int) -> Rate:
        """Of tokens with that signal."""
        key = (prospect.drafter, signal)
        if key not in self._signals:
            self._signals[key] = self._rate(PRIORS[signal], prospect)
        return self._signals[key]

    def beside(self, prospect: Prospect) -> Beside:
        """Of the alternatives beside its tokens."""
        if prospect.drafter not in self._alternatives:
            self._alternatives[prospect.drafter] = Beside(self._memory)
        return self._alternatives[prospect.drafter]

    def _rate(self, prior: float, prospect: Prospect) -> Rate:
        return Rate(prior, prospect.tests, self._memory)
