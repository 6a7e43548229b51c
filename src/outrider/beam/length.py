"""How many steps the draft goes ahead in beam search: fixed, or what has paid so far in this search.

All of a step's hypotheses must be right for it to be accepted, so the chance a of a step is far lower than a token's alpha,
and its pass scores num_beams tokens. The adaptive policy foresees (1 + a + … + a^n) steps for n t_draft + t_pass(n) seconds,
with t_pass taken to be a straight line (Leviathan Theorem 3.8 with measured costs), all three estimated from this search's
own rounds, of which late ones count more. The result of a search does not depend on it, only the time does.
"""

from __future__ import annotations

from outrider.draft_length.base import MAX_DRAFT
from outrider.support.checks import check_count

LONGEST = 8
FIRST = 3  # steps of the first draft, after one pass without
DECAY = 0.95
PROBE_AFTER = 12  # passes without a draft, after which one step is drafted to see whether it pays by now; twice as many
# after each time that it did not, up to 96: the draft has to read all that it missed
LONGEST_PAUSE = 96


class BeamLength:
    """fixed: that many steps, 0 … 64; None for the adaptive policy."""

    def __init__(self, fixed: int | None = None) -> None:
        if fixed is not None:
            check_count("num_draft_tokens", fixed, 0, MAX_DRAFT, "use 0 for no draft")
        self._fixed = fixed
        self._rounds = 0
        self._idle = 0
        self._patience = PROBE_AFTER
        self._accepted, self._tested = 1.0, 2.0  # a prior worth two steps
        self._draft_seconds = self._drafted = 0.0
        self._sums = [0.0] * 5  # of 1, n, t, n², n·t over the passes

    def plan(self) -> int:
        """Steps to draft now."""
        if self._fixed is not None:
            return self._fixed
        if self._rounds < 2:
            return FIRST * self._rounds
        best = max(range(LONGEST + 1), key=lambda n: (self._rate(n), -n))
        if best:
            self._patience = PROBE_AFTER
        elif self._idle >= self._patience:
            self._patience = min(2 * self._patience, LONGEST_PAUSE)
            return 1
        return best

    def update(self, drafted: int, tested: int, accepted: int, seconds: dict[str, float]) -> None:
        """Told what a round did."""
        self._rounds += 1
        self._idle = 0 if drafted else self._idle + 1
        if drafted:
            self._accepted = DECAY * self._accepted + accepted
            self._tested = DECAY * self._tested + tested
            self._draft_seconds = DECAY * self._draft_seconds + seconds["draft"]
            self._drafted = DECAY * self._drafted + drafted
        passed = sum(value for phase, value in seconds.items() if phase not in ("draft", "prefill"))
        new = (1.0, drafted, passed, drafted**2, drafted * passed)
        self._sums = [DECAY * old + term for old, term in zip(self._sums, new, strict=True)]

    def _rate(self, n: int) -> float:
        """Steps a second with n drafted."""
        chance = self._accepted / self._tested
        each = self._draft_seconds / self._drafted if self._drafted else 0.0
        return sum(chance**i for i in range(n + 1)) / max(n * each + self._pass_seconds(n), 1e-9)

    def _pass_seconds(self, n: int) -> float:
        """Least squares, never falling with n."""
        count, drafted, seconds, squares, products = self._sums
        spread = count * squares - drafted**2
        slope = max(0.0, (count * products - drafted * seconds) / spread) if spread > 1e-9 else 0.0
        return (seconds - slope * drafted) / count + slope * n
