"""What speculative execution should gain, and what it gained.

Times of slow function, consumer and guess: f, g, q; beta the chance that a guess is kept. One after the other a step takes
f + g. With a lookahead of 1, slow and guess begin together and the consumer when the guess is drawn: max(f, q + g) if the
guess is kept, and max(f, q) + g if not, since the redo need not wait for the consumer of the guess. For q = 0 that is

    E[seconds] = max(f, g) + (1 - beta) · min(f, g),

so the gain is at most 2, where f = g. With a lookahead K > 1, step i begins when the consumer of step i - 1 has its value
and step i - K is decided: S_i = max(S_{i-1} + q + g, S_{i-K} + f). A rejection at step i begins anew at S_i + max(f, q) + g.
Where g ≥ f this is no quicker than K = 1; where slow is slower than the consumer it tends to g + (1 - beta) · f.

Assumes constant times, and guesses kept independently with the same chance; and that there are processors enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider.errors import ParameterError
from outrider.speculation.run import Outcome

_NEGLIGIBLE = 1e-12
_MANY = 10_000


def expected_seconds(beta: float, slow: float, consume: float, fast: float = 0.0, lookahead: int = 1) -> float:
    """Mean seconds of a step. lookahead 0: one after the other. Exact under the assumptions of this module."""
    if not 0.0 <= beta <= 1.0:
        raise ParameterError(f"beta must be in [0, 1], got {beta}: it is the chance that a guess is kept")
    for name, value in (("slow", slow), ("consume", consume), ("fast", fast)):
        if not (math.isfinite(value) and value >= 0.0):
            raise ParameterError(f"{name} must be finite and 0 or more seconds, got {value}")
    if lookahead < 0:
        raise ParameterError(f"lookahead must be 0 or more, got {lookahead}")
    if lookahead == 0:
        return slow + consume
    pace = max(fast + consume, slow / lookahead)  # of a long run of kept guesses
    if beta == 1.0:
        return pace
    # A cycle ends with a rejection: after j kept guesses with probability beta^j (1 - beta), and has j + 1 steps.
    starts: list[float] = []
    total, chance = 0.0, 1.0 - beta
    while chance > _NEGLIGIBLE and len(starts) < _MANY:
        begin = starts[-1] + fast + consume if starts else 0.0
        if len(starts) >= lookahead:
            begin = max(begin, starts[-lookahead] + slow)
        starts.append(begin)
        total += chance * (begin + max(slow, fast) + consume)
        chance *= beta
    # What is left of the series: the starts go on at the long-run pace.
    rest = chance / (1.0 - beta)
    total += rest * (starts[-1] + pace / (1.0 - beta) + max(slow, fast) + consume)
    return total * (1.0 - beta)


@dataclass(frozen=True)
class Gain:
    """Plain and speculative runs of the same functions. Seconds a step; speed-ups are plain over speculative.

    slow, consume: as measured in the plain run, one at a time; fast: in the speculative one. acceptance: kept guesses /
    guesses. beta: its mean expectation, None for densities. contention: how much longer slow and consumer took side by
    side than alone.
    """

    steps: int
    slow: float
    consume: float
    fast: float
    acceptance: float
    beta: float | None
    plain: float
    speculative: float
    speedup: float
    predicted: float
    contention: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps: {1e3 * self.plain:.2f} ms each plain, {1e3 * self.speculative:.2f} ms speculative: "
            f"{self.speedup:.2f}×, predicted {self.predicted:.2f}× (slow {1e3 * self.slow:.2f} ms, consumer "
            f"{1e3 * self.consume:.2f} ms, guess {1e3 * self.fast:.2f} ms, {self.acceptance:.0%} of the guesses kept; side "
            f"by side both took {self.contention:.2f} times as long)"
        )


def measured_gain(
    plain: Sequence[Outcome], plain_seconds: float, drafted: Sequence[Outcome], seconds: float, lookahead: int
) -> Gain:
    """The gain of a chain over one with a lookahead of 0. seconds: of each whole chain."""
    if not plain or not drafted:
        raise ParameterError("plain and drafted must hold at least one step each")
    slow, consume = (fmean(one.seconds[part] for one in plain) for part in ("slow", "consume"))
    fast = fmean(one.seconds["fast"] for one in drafted)
    acceptance = fmean(bool(one.accepted) for one in drafted)
    betas = [one.beta for one in drafted if one.beta is not None]
    each, other = plain_seconds / len(plain), seconds / len(drafted)
    predicted = expected_seconds(acceptance, slow, consume, fast, lookahead)
    together = fmean(one.seconds["slow"] + one.seconds["consume"] for one in drafted)
    return Gain(
        steps=len(drafted),
        slow=slow,
        consume=consume,
        fast=fast,
        acceptance=acceptance,
        beta=fmean(betas) if betas else None,
        plain=each,
        speculative=other,
        speedup=each / other,
        predicted=(slow + consume) / predicted,
        contention=together / (slow + consume),
    )
