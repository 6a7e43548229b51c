"""What rounds of a row take, as its policy reckons with them: by tables of all rows that share its passes.

In a batch whose passes are as wide as their widest row, a row that drafts widens the pass of all. How many others draft with
it must not matter, or its tokens would depend on its company; so it reckons as if all were like itself. Where a row has
something to offer in a share s of its rounds, a pass of B rows is wide in 1 - (1 - s)^B of them, and what widening costs
falls on the s that had a reason: (1 - (1 - s)^B) / s times the difference, from 1 (all draft) to B (one does).

Where a pass of another width than the one before takes longer, drafts are charged for it, and one that fits into a width
that is kept anyhow is not (`kept_widths`).

A draft that reads the text itself is behind after a pause. It reads that once, so later drafts pay their share of it.
"""

from __future__ import annotations

from outrider.costs import Costs
from outrider.draft_length.base import Prospect
from outrider.draft_length.kept_widths import KeptWidths
from outrider.draft_length.learned import Learned

HANDLING = 1e-4  # seconds of planning, judging and recording a row's draft, of each row beside another one; what it takes of
# one row is small beside a pass (`AdaptiveLength.margin`)
# Drafts to come, among which what one is behind is shared out: half of those that would be left at two tokens a round.
TOKENS_A_SHARE, MOST_SHARES = 4, 32


def handling(costs: Costs) -> float:
    """What drafts of all rows take beside the passes."""
    return HANDLING * (costs.rows - 1)


class RoundSeconds:
    """Of one row. learned: by it and others, with what passes cost now. whole: what they cost with all rows of the list."""

    def __init__(self, learned: Learned, whole: Costs) -> None:
        self._learned = learned
        self._whole = whole
        self._widths = KeptWidths(whole)
        self.begin(0, 0)

    def begin(self, context: int, room: int) -> None:
        """A round begins, after so many tokens, with so many still to come."""
        self._context = context
        self._costs = self._learned.costs.costs
        self._times = self._learned.costs.times
        self._passes = self._costs.near(context)
        self._shares = 1 + min(MOST_SHARES, room // TOKENS_A_SHARE)
        self.plain = self._passes[1]
        """Of a pass that scores one token of each row."""

    def verify(self, tokens: int) -> float:
        """Of a pass that scores so many tokens of each row."""
        return self._passes[tokens]

    @property
    def loss_unit(self) -> float:
        """Of a pass with two changes of its width."""
        return self.plain + 2.0 * self._costs.change

    def step(self, prospect: Prospect) -> float:
        """Of a further drafted token."""
        return prospect.step_seconds * self._times.get(prospect.drafter, 1.0)

    def drafting(self, prospect: Prospect, tokens: int) -> float:
        """To reckon with, for a draft of so many tokens."""
        seconds = self._own(prospect, tokens)
        return seconds + self._behind(prospect) / self._shares if prospect.behind_seconds else seconds

    def drafted(self, prospect: Prospect, tokens: int) -> float:
        """Of a draft that has been made."""
        return self._own(prospect, tokens) + self._behind(prospect)

    def probing(self, prospect: Prospect) -> float:
        """To be charged for a draft of one token that may be the last for a while, by rounds of all rows."""
        wider = max(0.0, self._passes[2] - self.plain + self.beyond(1, prospect) - self.beyond(0))
        return self.alone(self._own(prospect, 1), wider) + self._behind(prospect)

    def probing_length(self, prospect: Prospect, length: int) -> float:
        """The same for one token more than `length`."""
        wider = self._passes[length + 2] - self._passes[length + 1]
        wider += self.beyond(length + 1, prospect) - self.beyond(length, prospect)
        return self.alone(self.step(prospect), max(0.0, wider))

    def _own(self, prospect: Prospect, tokens: int) -> float:
        seconds = prospect.start_seconds + tokens * prospect.step_seconds
        return seconds * self._times.get(prospect.drafter, 1.0)

    def _behind(self, prospect: Prospect) -> float:
        """Each row reads its own."""
        return prospect.behind_seconds * self._costs.rows / self._whole.rows

    def round(self, drafted: int, drafting: float, alternatives: int = 0) -> float:
        """Of a round that drafts so many tokens in so many seconds."""
        scored = self._passes[drafted + 1 + alternatives]
        if drafted:
            scored += handling(self._costs)
        if self._costs.company == 1:
            return drafting + scored
        return self.plain + self.shared(drafting + scored - self.plain)

    def saved(self, accepted: int, drafted: int, drafting: float, alternatives: int = 0) -> float:
        """What a round saves against plain decoding."""
        return (accepted + 1) * self.plain - self.round(drafted, drafting, alternatives)

    def shared(self, extra: float) -> float:
        """What seconds more than a plain round's cost, where all rows of the batch wait for them: see the top."""
        company = self._costs.company
        if company == 1 or extra <= 0.0:
            return extra
        share = max(self._learned.offered.value, 1e-6)
        return extra * (1.0 - (1.0 - share) ** company) / share

    def alone(self, drafting: float, extra: float) -> float:
        """The same of a probe, and what drafting takes: rows probe now and then, each at another time, so that all wait for
        one. The table's seconds of drafting are those of all rows.
        """
        return drafting * self._costs.rows + extra * self._costs.company

    def beyond(self, drafted: int, prospect: Prospect | None = None) -> float:
        """What a round with so many tokens of that prospect takes by the width of its pass, and those of the passes after.

        A model that is mostly right drafts in the next round, too.
        """
        if not self._costs.change:  # asked for many lengths in each round
            return 0.0
        right = self._learned.of(prospect)[0].value if prospect is not None and prospect.gated else 0.0
        lasting = max(0.0, 2.0 * right - 1.0)
        return self._widths.expected(drafted, self._context, lasting)

    def follow(self, drafted: int) -> float:
        """A round drafted so many. → what its pass took beyond its own tokens"""
        return self._widths.follow(drafted, self._context)
