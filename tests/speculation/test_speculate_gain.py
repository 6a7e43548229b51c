"""Speculation for any function: the predicted gain is that of a simulation, and of what was run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from outrider.errors import ParameterError
from outrider.speculation.gain import expected_seconds, measured_gain
from outrider.speculation.run import Outcome


def simulated(beta: float, slow: float, consume: float, fast: float, lookahead: int, steps: int = 60_000) -> float:
    """Seconds a step, event by event, each step kept or not by a coin: not by cycles, as the formula has it."""
    coins = np.random.default_rng(3).random(steps) < beta
    begun: list[float] = []  # of the steps since the last rejection
    decided = ready = 0.0  # when the newest decision is known, when the next x is
    decisions: list[float] = []
    for kept in coins:
        begin = max(ready, decisions[-lookahead] if len(decisions) >= lookahead else 0.0)
        begun.append(begin)
        decided = max(decided, begin + slow)
        decisions.append(decided)
        if kept:
            ready = begin + fast + consume
        else:
            ready = max(decided, begin + fast) + consume
            decisions.clear()
            begun.clear()
    return max(ready, decided) / steps


@pytest.mark.parametrize("lookahead", [1, 2, 4, 40])
@pytest.mark.parametrize(("slow", "consume", "fast"), [(3.0, 1.0, 0.2), (1.0, 3.0, 0.0), (1.0, 1.0, 0.5), (0.1, 1.0, 0.3)])
@pytest.mark.parametrize("beta", [0.0, 0.6, 0.95])
def test_the_expected_time_is_that_of_a_simulation(
    beta: float, slow: float, consume: float, fast: float, lookahead: int
) -> None:
    expected = expected_seconds(beta, slow, consume, fast, lookahead)
    assert expected == pytest.approx(simulated(beta, slow, consume, fast, lookahead), rel=0.01)


def test_the_expected_time_has_its_closed_form_and_limits() -> None:
    for beta, slow, consume in itertools.product((0.0, 0.3, 0.9, 1.0), (0.5, 1.0, 2.0), (0.5, 1.0, 2.0)):
        one = max(slow, consume) + (1 - beta) * min(slow, consume)
        assert expected_seconds(beta, slow, consume) == pytest.approx(one)
        assert expected_seconds(beta, slow, consume, lookahead=0) == slow + consume
        many = expected_seconds(beta, slow, consume, lookahead=64)
        assert many <= one + 1e-9
        if consume >= slow or beta < 1:
            assert many == pytest.approx(consume + (1 - beta) * slow, rel=1e-3)
    assert expected_seconds(0.999999, 2.0, 1.0, lookahead=2) == pytest.approx(
        expected_seconds(1.0, 2.0, 1.0, lookahead=2), rel=1e-3
    )
    wrong: dict[str, Any]
    for wrong in ({"beta": 1.1}, {"slow": -1.0}, {"lookahead": -1}, {"fast": float("nan")}):
        with pytest.raises(ParameterError):
            expected_seconds(**dict({"beta": 0.5, "slow": 1.0, "consume": 1.0}, **wrong))


def test_the_gain_is_that_of_the_outcomes() -> None:
    plain = [Outcome(i, 0, 0, 0, None, None, {"slow": 2.0, "fast": 0.0, "consume": 1.0}) for i in range(2)]
    drafted = [Outcome(i, 0, 0, 0, i < 3, 0.7, {"slow": 2.2, "fast": 0.1, "consume": 1.1}) for i in range(4)]
    gain = measured_gain(plain, 6.0, drafted, 10.0, 1)
    assert [gain.plain, gain.speculative, gain.speedup] == pytest.approx([3.0, 2.5, 1.2])
    assert [gain.acceptance, gain.beta, gain.contention] == pytest.approx([0.75, 0.7, 1.1])
    assert gain.predicted == pytest.approx(3.0 / expected_seconds(0.75, 2.0, 1.0, 0.1, 1))
    assert "1.20×" in str(gain)
