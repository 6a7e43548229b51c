"""How many tokens to draft next. Each sequence has a policy state of its own; 0 is plain decoding.

A policy sees what was accepted before and nothing of the coming draft's tokens, so it can't bend the law (`verify`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from outrider import theory
from outrider.costs import Costs
from outrider.errors import ParameterError

MAX_DRAFT = 64


class LengthState(ABC):
    """The policy for one sequence."""

    @abstractmethod
    def choose(self) -> int:
        """How many tokens to draft now."""

    def update(self, drafted: int, tested: int, accepted: int) -> None:
        """Learn from a round (see `records.Round`)."""
        del drafted, tested, accepted


class DraftLength(ABC):
    """A policy: makes one state per sequence."""

    @abstractmethod
    def start(self) -> LengthState:
        """The state for a new sequence."""


@dataclass(frozen=True)
class FixedLength(DraftLength, LengthState):
    """Always the same number, as in both papers."""

    length: int

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or not 0 <= self.length <= MAX_DRAFT:
            raise ParameterError(f"num_draft_tokens must be a whole number in 0 … {MAX_DRAFT}, got {self.length!r}")

    def start(self) -> LengthState:
        return self

    def choose(self) -> int:
        return self.length


@dataclass(frozen=True)
class AdaptiveLength(DraftLength):
    """The length that pays most at the acceptance rate seen lately, at measured costs; 0 if none pays.

    costs: measured or assumed. longest: the most it will draft. prior: the acceptance rate assumed at first, with the
    weight of `prior_tests` decisions. memory: decisions after which an old one counts 1/e.
    """

    costs: Costs
    longest: int = 10
    prior: float = 0.7
    prior_tests: float = 3.0
    memory: float = 30.0

    def start(self) -> LengthState:
        return _AdaptiveState(self)

    def best(self, alpha: float) -> int:
        """argmax over 0 … longest of E[tokens] / seconds of a round."""
        return max(range(self.longest + 1), key=lambda k: (theory.expected_tokens(alpha, k) / self.costs.round(k), -k))


class _AdaptiveState(LengthState):
    """Exponentially forgotten counts of tests and acceptances, and probes while nothing pays."""

    FIRST_PROBE = 8
    LAST_PROBE = 128

    def __init__(self, policy: AdaptiveLength) -> None:
        self._policy = policy
        self._tested = policy.prior_tests
        self._accepted = policy.prior * policy.prior_tests
        self._idle = 0
        self._patience = self.FIRST_PROBE

    @property
    def alpha(self) -> float:
        return min(1.0, self._accepted / self._tested)

    def choose(self) -> int:
        best = self._policy.best(self.alpha)
        if best > 0:
            self._patience = self.FIRST_PROBE
            self._idle = 0
            return best
        self._idle += 1
        if self._idle < self._patience:
            return 0
        # One token now and then tells whether the text has changed; each failure makes the next probe rarer.
        self._idle = 0
        self._patience = min(2 * self._patience, self.LAST_PROBE)
        return 1

    def update(self, drafted: int, tested: int, accepted: int) -> None:
        del drafted
        keep = (1.0 - 1.0 / self._policy.memory) ** tested
        self._tested = keep * self._tested + tested
        self._accepted = keep * self._accepted + accepted
