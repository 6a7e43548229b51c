"""How many tokens to draft next. Each sequence has a policy state of its own; 0 is plain decoding.

A policy sees what was accepted before and nothing of the coming draft's tokens, so it can't bend the law (`verify`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from outrider import theory
from outrider.costs import Costs
from outrider.errors import ParameterError

MAX_DRAFT = 64


class LengthState(ABC):
    """The policy for one sequence.

    hint: what the drafter knows beforehand about how its proposal will fare, `Drafter.hint`; it is computed from tokens
    that are already certain.
    """

    @abstractmethod
    def choose(self, hint: int) -> int:
        """How many tokens to draft now."""

    def update(self, hint: int, drafted: int, tested: int, accepted: int) -> None:
        """Learn from a round (see `records.Round`)."""
        del hint, drafted, tested, accepted


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

    def choose(self, hint: int) -> int:
        del hint
        return self.length


@dataclass(frozen=True)
class AdaptiveLength(DraftLength):
    """The length that pays most at the acceptance seen lately, at measured costs; 0 if none pays.

    costs: measured or assumed. prior: hint → the acceptance assumed at first, of the first drafted token and of each
    later one (`Drafter.prior`), with the weight of `prior_tests` decisions. longest: the most it will draft. memory:
    decisions after which an old one counts 1/e.
    """

    costs: Costs
    prior: Callable[[int], tuple[float, float]] = lambda hint: (0.7, 0.7)  # noqa: ARG005
    longest: int = 16
    prior_tests: float = 4.0
    memory: float = 40.0

    def start(self) -> LengthState:
        return _AdaptiveState(self)

    def best(self, first: float, later: float) -> int:
        """Argmax over 0 … longest of E[tokens] / seconds of a round.

        E[tokens] = 1 + first · (1 + later + … + later^(k-1)), Leviathan's Equation 1 with a first token that is accepted
        at another rate than those after it; they are equal for a model, and far apart for a copy.
        """
        rates = {k: self._tokens(first, later, k) / self.costs.round(k) for k in range(self.longest + 1)}
        return max(rates, key=lambda k: (rates[k], -k))

    def _tokens(self, first: float, later: float, length: int) -> float:
        return 1.0 + (first * theory.expected_tokens(later, length - 1) if length else 0.0)


class _Rate:
    """An acceptance rate, old decisions forgotten exponentially."""

    def __init__(self, prior: float, weight: float, memory: float) -> None:
        self._tested = weight
        self._accepted = prior * weight
        self._keep = 1.0 - 1.0 / memory

    @property
    def value(self) -> float:
        return min(1.0, self._accepted / self._tested)

    def update(self, tested: int, accepted: int) -> None:
        keep = self._keep**tested
        self._tested = keep * self._tested + tested
        self._accepted = keep * self._accepted + accepted


class _AdaptiveState(LengthState):
    """A pair of rates per hint, and rare probes while nothing pays."""

    FIRST_PROBE = 8
    LAST_PROBE = 128

    def __init__(self, policy: AdaptiveLength) -> None:
        self._policy = policy
        self._rates: dict[int, tuple[_Rate, _Rate]] = {}
        self._idle = 0
        self._patience = self.FIRST_PROBE

    def choose(self, hint: int) -> int:
        first, later = self._of(hint)
        best = self._policy.best(first.value, later.value)
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

    def update(self, hint: int, drafted: int, tested: int, accepted: int) -> None:
        if drafted:
            first, later = self._of(hint)
            first.update(1, min(accepted, 1))
            later.update(tested - 1, max(accepted - 1, 0))

    def _of(self, hint: int) -> tuple[_Rate, _Rate]:
        if hint not in self._rates:
            policy = self._policy
            first, later = policy.prior(hint)
            self._rates[hint] = (
                _Rate(first, policy.prior_tests, policy.memory),
                _Rate(later, policy.prior_tests, policy.memory),
            )
        return self._rates[hint]
