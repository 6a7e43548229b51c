"""What drafts have cost and brought, in seconds by the cost tables: what may be spent on probes, and when to stop losing.

Once a further draft could make the loss greater than is allowed, drafts are made on paper only (`PaperRound`): rounds that
are planned, not offered, and then compared with the tokens that came. What they would have saved pays the debt. Each further
time it takes twice as much, until real drafts have made good what was lost, so that a text on which they win on paper and
lose in earnest costs little all the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PaperRound:
    """A round of a deterministic proposal of `length` tokens after `start` tokens, as if it were made."""

    drafter: str
    start: int
    length: int
    accepted: int = 0


class Account:
    """probe_share: of the time, for probes. loss_passes, loss_share: passes, and share of the time, that drafts may lose."""

    def __init__(self, probe_share: float, loss_passes: float, loss_share: float) -> None:
        self._probe_share = probe_share
        self._loss_passes = loss_passes
        self._loss_share = loss_share
        self._elapsed = 0.0
        self._probed = 0.0
        self._saved = 0.0  # against plain decoding
        self._on_paper: float | None = None  # saved on paper since drafts were suspended
        self._pardons = 0
        self._forgiven = 0.0  # lost in earnest, and paid for on paper only

    def spend(self, seconds: float, saved: float = 0.0) -> None:
        """A round took so long, and saved so much against plain decoding (less than 0: it lost)."""
        self._elapsed += seconds
        self._saved += saved
        if self._saved >= self._forgiven:
            self._pardons, self._forgiven = 0, 0.0

    def afford(self, seconds: float) -> bool:
        """Whether a probe may cost so much more than the round it replaces; it is then spent."""
        if self._probed + seconds > self._probe_share * self._elapsed:
            return False
        self._probed += seconds
        return True

    def _allowed(self, pass_seconds: float) -> float:
        return self._loss_passes * pass_seconds + self._loss_share * self._elapsed

    def bearable(self, pass_seconds: float) -> float:
        """Seconds that the next draft may lose."""
        return self._saved + self._allowed(pass_seconds)

    def suspended(self, pass_seconds: float, risk: float) -> bool:
        """Whether a draft that may lose `risk` seconds could make drafts lose more than they may."""
        allowed, short = self._allowed(pass_seconds), self.bearable(pass_seconds) < risk
        if self._on_paper is None:
            if not short:
                return False
            self._on_paper = 0.0
        if self._on_paper >= allowed * 2**self._pardons:
            self._pardons += 1
            self._forgiven += max(0.0, -self._saved)
            self._saved = max(0.0, self._saved)
        elif short:
            return True
        self._on_paper = None  # without a pardon what was lost still counts: there is a little more to lose by now
        return False

    def save_on_paper(self, seconds: float) -> None:
        """What a paper round would have saved, or lost."""
        if self._on_paper is not None:
            self._on_paper = max(0.0, self._on_paper + seconds)
