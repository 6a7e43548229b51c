"""Acceptance rates learned online: old decisions are forgotten, so that a change of the text shows."""

from __future__ import annotations


class Rate:
    """Accepted / tested with exponential forgetting, starting from a prior that weighs like some decisions."""

    def __init__(self, prior: float, weight: float, memory: float) -> None:
        self._tested = weight
        self._accepted = prior * weight
        self._keep = 1.0 - 1.0 / memory

    @property
    def value(self) -> float:
        """The estimate, in [0, 1]."""
        return min(1.0, self._accepted / self._tested)

    def update(self, tested: int, accepted: int) -> None:
        """Count decisions, of which `accepted` went well."""
        keep = self._keep**tested
        self._tested = keep * self._tested + tested
        self._accepted = keep * self._accepted + accepted
