"""How many steps the draft goes ahead in beam search: fixed, or what has paid so far in this search.

All of a step's hypotheses must be right for it to be accepted, so the chance a of a step is far lower than a token's alpha,
and its pass scores num_beams tokens. The adaptive policy foresees (1 + a + … + a^n) steps for n t_draft + t_pass(n) seconds
(Leviathan Theorem 3.8 with measured costs), all estimated from this search's own rounds: its result does not depend on the
length, only the time does, so seconds may be measured as it goes.

What drafts have lost against passes without is kept account of. Where they seem to pay they are made until they have lost
what may be lost; where they only might, one step is tried as long as that could be borne if it were in vain.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from outrider.settings.drafting import MAX_DRAFT
from outrider.support.checks import check_count

LONGEST = 8
PLAIN_FIRST = 3  # passes without a draft at the beginning; the first one has a single row, so it is no measure of others
PLAIN_EVERY = 32  # after so many with a draft one without, since passes grow with the text
PRIOR_ACCEPTED, PRIOR_TESTED = 1.0, 2.0
DECAY = 0.95  # of what was accepted, a round with a draft
FORGETTING = 0.97  # and one without, towards the prior: a draft may have turned good since
KEPT = 7  # measurements of each cost, of which the median counts, so that one which was disturbed does not
MARGIN = 1.02  # nothing is drafted for a smaller gain
FREE_PASSES = 1.5  # that drafts may lose against plain search,
LOSS_SHARE = 0.015  # with this share of the time
BANKED_PASSES = 3.0  # of gains that may be lost again; without a bound a long gain would pay for a long loss


class BeamLength:
    """fixed: that many steps, 0 … 64; None for the adaptive policy."""

    def __init__(self, fixed: int | None = None) -> None:
        if fixed is not None:
            check_count("num_draft_tokens", fixed, 0, MAX_DRAFT, "use 0 for no draft")
        self._fixed = fixed
        self._rounds = self._idle = self._drafting = 0
        self._accepted, self._tested = PRIOR_ACCEPTED, PRIOR_TESTED
        self._passes: dict[int, deque[float]] = {}  # seconds by drafted steps
        self._draft: deque[float] = deque(maxlen=KEPT)  # seconds of a step
        self._missed: deque[float] = deque(maxlen=KEPT)  # seconds of the draft for a step that it did not follow
        self._elapsed = self._balance = 0.0

    def plan(self) -> int:
        """Steps to draft now."""
        if self._fixed is not None:
            return self._fixed
        if self._rounds < PLAIN_FIRST or self._drafting >= PLAIN_EVERY:
            return 0
        bearable = self._balance >= -self._allowed
        if not self._draft:
            return int(bearable)
        chance = self._accepted / self._tested
        if bearable and (best := self._best(chance)):
            return best
        hoped = chance + (chance * (1.0 - chance) / self._tested) ** 0.5
        return 1 if self._best(hoped) and self._balance - self._vain_seconds() >= -self._allowed else 0

    def update(self, drafted: int, tested: int, accepted: int, seconds: dict[str, float]) -> None:
        """Told what a round did."""
        self._rounds += 1
        if self._fixed is not None or self._rounds == 1:
            return
        passed = sum(value for phase, value in seconds.items() if phase not in ("draft", "prefill"))
        self._elapsed += passed + seconds["draft"]
        self._passes.setdefault(drafted, deque(maxlen=KEPT)).append(passed)
        if not drafted:
            self._balance -= seconds["draft"]  # of a draft that had nothing to say
            self._accepted = PRIOR_ACCEPTED + FORGETTING * (self._accepted - PRIOR_ACCEPTED)
            self._tested = PRIOR_TESTED + FORGETTING * (self._tested - PRIOR_TESTED)
            self._idle, self._drafting = self._idle + 1, 0
            return
        self._accepted = DECAY * self._accepted + accepted
        self._tested = DECAY * self._tested + tested
        plain = self._pass_seconds(0)
        gained = (accepted + 1) * plain - passed - seconds["draft"]
        self._balance = min(BANKED_PASSES * plain, self._balance + gained)
        if self._idle <= 1 or not self._draft:
            self._draft.append(seconds["draft"] / drafted)
        else:
            self._missed.append(max(0.0, seconds["draft"] - drafted * median(self._draft)) / self._idle)
        self._idle, self._drafting = 0, self._drafting + 1

    def _best(self, chance: float) -> int:
        """The length with the most steps a second if a step's chance is this, 0 where none is ahead by enough."""
        best, most = 0, MARGIN / self._pass_seconds(0)
        each = median(self._draft)
        for n in range(1, min(LONGEST, 2 * max(self._passes)) + 1):  # not far beyond what was measured
            rate = sum(chance**i for i in range(n + 1)) / (n * each + self._pass_seconds(n))
            if rate > most:
                best, most = n, rate
        return best

    @property
    def _allowed(self) -> float:
        """Seconds that drafts may have lost by now."""
        return FREE_PASSES * self._pass_seconds(0) + LOSS_SHARE * self._elapsed

    def _vain_seconds(self) -> float:
        """What a drafted step loses if it is rejected."""
        catching_up = self._idle * median(self._missed) if self._idle > 1 and self._missed else 0.0
        return median(self._draft) + catching_up + self._pass_seconds(1) - self._pass_seconds(0)

    def _pass_seconds(self, n: int) -> float:
        """Of a pass with n drafted steps: straight between the lengths that were measured and beyond them, and growing."""
        known = sorted(self._passes)
        seconds = [median(self._passes[one]) for one in known]
        seconds = [max(seconds[: i + 1]) for i in range(len(known))]
        right = next((i for i, one in enumerate(known) if one >= n), len(known) - 1)
        if right == 0:
            return max(seconds[0], 1e-9)
        left = right - 1 if known[right] >= n else 0  # beyond the longest the line goes through plain passes: least noise
        slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
        return max(seconds[left] + slope * (n - known[left]), 1e-9)
