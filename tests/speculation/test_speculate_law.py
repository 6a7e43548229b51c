"""Speculation for any function, one sample: exact in law, by enumeration over all numbers drawn and by samples of densities.

Sampled tests reject at p < 1e-6 with fixed seeds. Planted bugs must be rejected at the same level.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import outrider
from outrider.errors import NumericalError
from outrider.speculation import laws as laws_module
from outrider.speculation.laws import Decision, Density, Finite, as_law, decide
from tests.helpers.marks import slow
from tests.helpers.toys import WRONG_RULES

ALARM = 1e-6
PAIRS: dict[str, tuple[Any, Any]] = {
    "differ": ([1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
    "equal": ([1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
    "disjoint": ([1 / 2, 1 / 2, 0, 0], [0, 0, 1 / 4, 3 / 4]),
    "guess without doubt": ([1 / 4, 1 / 2, 1 / 4, 0], [0, 1, 0, 0]),
    "law without doubt": ([0, 0, 1, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    "mappings": ({"a": 1 / 2, "b": 1 / 4, "c": 1 / 4}, {"d": 1 / 2, "c": 1 / 8, "a": 3 / 8}),
}


class Given(np.random.Generator):
    """Gives these numbers and no others."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(np.random.Philox(0))
        self._numbers = list(numbers)

    def random(self, size: Any = None, *_: Any, **__: Any) -> Any:
        if size is None:
            return self._numbers.pop(0)
        return np.array([self._numbers.pop(0) for _ in range(size)])


FIRST, THEN = [0.1, 0.1, 0.8], [[0.2, 0.3, 0.5], [0.1, 0.7, 0.2], [0.6, 0.3, 0.1]]


def remembered(seed: int, lookahead: int) -> tuple[int, int]:
    """Two samples of a chain whose `fast` remembers laws that `slow` has computed, on guesses that were given up, too."""
    memo: dict[int | None, list[float]] = {}
    third = threading.Event()

    def slow(x: tuple[int, int | None]) -> list[float]:
        depth, last = x
        if depth == 0:
            third.wait(0.02)  # the guesses after it get that far
        memo[last] = FIRST if last is None else THEN[last]
        if depth == 2:
            third.set()
        return memo[last]

    def fast(x: tuple[int, int | None]) -> list[float]:
        return [0.45, 0.45, 0.1] if x[0] == 0 else memo.get(x[1], [1 / 3] * 3)

    with outrider.speculate(slow, fast, lambda x, y: (x[0] + 1, y), lookahead=lookahead, seed=seed) as run:
        first, second, _ = (one.sample for one in run.chain((0, None), 3))
    return first, second


@pytest.mark.parametrize("lookahead", [slow(1), 3])
def test_fast_may_remember_what_was_computed_for_guesses_that_were_given_up(lookahead: int) -> None:
    """Numbers that had steered such guesses were taken again: the second sample was [.37, .52, .10] after 2 (p = 9e-64)."""
    drawn = Counter(remembered(seed, lookahead) for seed in range(600))
    pairs = [(a, b) for a in range(3) for b in range(3)]
    expected = [600 * FIRST[a] * THEN[a][b] for a, b in pairs]
    assert stats.chisquare([drawn[pair] for pair in pairs], expected).pvalue > ALARM


def middles(count: int) -> list[float]:
    return [(i + 0.5) / count for i in range(count)]


def exact_law(slow: Any, fast: Any, same_noise: bool = False) -> dict[Any, float]:
    """The law of the sample, over a grid of all numbers, exact for PAIRS: guesses flip at eighths, the rest at quarters."""
    target, guessed = as_law(slow, "slow"), as_law(fast, "fast")
    found: Counter[Any] = Counter()
    for first, second, third in itertools.product(middles(8), middles(4), middles(4)):
        guess = guessed.sample(Given(first))
        found[decide(target, guessed, guess, Given(second, second if same_noise else third)).sample] += 1
    return {outcome: count / 128 for outcome, count in found.items()}


def wanted(slow: Any) -> dict[Any, float]:
    pairs = slow.items() if isinstance(slow, dict) else enumerate(slow)
    return {outcome: float(chance) for outcome, chance in pairs if chance}


@pytest.mark.parametrize("name", PAIRS)
def test_the_sample_has_exactly_the_slow_functions_law(name: str) -> None:
    slow, fast = PAIRS[name]
    assert exact_law(slow, fast) == pytest.approx(wanted(slow), abs=1e-12)


@pytest.mark.parametrize("rule", [name for name in WRONG_RULES if "position" not in name])  # there is one position
def test_wrong_rules_have_another_law(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws_module, "verify", WRONG_RULES[rule])
    slow, fast = PAIRS["differ"]
    assert exact_law(slow, fast) != pytest.approx(wanted(slow), abs=1e-3)


def test_redoing_with_the_number_that_rejected_has_another_law() -> None:
    slow, fast = PAIRS["differ"]
    assert exact_law(slow, fast, same_noise=True) != pytest.approx(wanted(slow), abs=1e-3)


def test_a_guess_without_doubt_is_not_returned_without_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: a one-hot guess at a one-hot law, kept because nothing seems to be left to chance."""
    slow, fast = [0.0, 1.0], [1.0, 0.0]
    assert exact_law(slow, fast) == {1: 1.0}
    monkeypatch.setattr(laws_module, "_decide_finite", lambda target, guessed, guess, rng: Decision(guess, True, 0.0))
    assert exact_law(slow, fast) == {0: 1.0}


def test_beta_is_the_overlap_and_the_chance_to_be_kept() -> None:
    slow, fast = PAIRS["differ"]
    target, guessed = as_law(slow, "slow"), as_law(fast, "fast")
    kept = 0
    for first, second in itertools.product(middles(8), middles(8)):
        decision = decide(target, guessed, guessed.sample(Given(first)), Given(second, 0.5))
        assert decision.beta == pytest.approx(1 / 2)
        kept += decision.accepted
    assert kept / 64 == pytest.approx(1 / 2)


# Densities.

TARGET, GUESSED = stats.norm(0.0, 1.0), stats.norm(0.8, 1.5)


def normal(law: Any, factor: float = 0.0) -> Density:
    """Much quicker than scipy's own."""
    mean, deviation = law.mean(), law.std()
    constant = -0.5 * np.log(2 * np.pi * deviation**2) + factor
    return Density(lambda rng: rng.normal(mean, deviation), lambda y: float(constant - 0.5 * ((y - mean) / deviation) ** 2))


def drawn(target: Density, guessed: Density, count: int = 8000) -> tuple[list[float], float]:
    rng = np.random.default_rng(5)
    decisions = [decide(target, guessed, guessed.sample(rng), rng) for _ in range(count)]
    return [one.sample for one in decisions], sum(one.accepted for one in decisions) / count


def test_densities_are_exact_too() -> None:
    samples, kept = drawn(normal(TARGET), normal(GUESSED))
    assert stats.kstest(samples, TARGET.cdf).pvalue > ALARM
    grid = np.linspace(-8, 8, 4001)
    overlap = np.trapezoid(np.minimum(TARGET.pdf(grid), GUESSED.pdf(grid)), grid)
    assert kept == pytest.approx(overlap, abs=6 * (overlap * (1 - overlap) / len(samples)) ** 0.5)


@pytest.mark.parametrize("bug", ["not normalised", "redo from the law itself", "always keep"])
def test_wrong_rules_for_densities_are_rejected(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = normal(TARGET, 0.5 if bug == "not normalised" else 0.0)
    if bug == "redo from the law itself":
        monkeypatch.setattr("outrider.speculation.laws.math.expm1", lambda _: -1.0)
    if bug == "always keep":
        monkeypatch.setattr("outrider.speculation.laws.math.log1p", lambda _: -1e9)
    samples, _ = drawn(target, normal(GUESSED))
    assert stats.kstest(samples, TARGET.cdf).pvalue < ALARM


def test_frozen_scipy_laws_may_be_given_continuous_or_countable() -> None:
    """Counts have a density with respect to counting: the same rule."""
    with outrider.speculate(lambda x: stats.poisson(3.0), lambda x: stats.poisson(2.2), lambda x, y: y, seed=3) as run:
        counts = Counter(int(outcome.sample) for outcome in run.chain(0, 600, lambda _: 0))
    want = [600 * stats.poisson(3.0).pmf(k) for k in range(8)]
    got = [counts[k] for k in range(8)]
    assert stats.chisquare([*got, 600 - sum(got)], [*want, 600 - sum(want)]).pvalue > ALARM


def test_a_frozen_law_that_draws_a_list_of_one_is_drawn_from() -> None:
    """Dirichlet's does; a matrix of one row is a sample as it is."""
    slow, fast = stats.dirichlet([2.0, 1.0, 3.0]), stats.dirichlet([1.0, 1.0, 1.0])
    first, accepted = zip(*drawn_from(slow, fast, 1500), strict=True)
    assert stats.kstest([sample[0] for sample in first], stats.beta(2.0, 4.0).cdf).pvalue > ALARM
    assert 0 < sum(accepted) < 1500
    matrix = as_law(stats.matrix_normal(rowcov=np.eye(1), colcov=np.eye(2)), "slow")
    assert isinstance(matrix, Density)
    assert matrix.sample(np.random.default_rng(0)).shape == (1, 2)


def drawn_from(slow: Any, fast: Any, count: int) -> list[tuple[Any, bool]]:
    rng = np.random.default_rng(0)
    target, guessed = as_law(slow, "slow"), as_law(fast, "fast")
    found = [decide(target, guessed, guessed.sample(rng), rng) for _ in range(count)]
    return [(each.sample, each.accepted) for each in found]


def test_equal_densities_are_always_kept() -> None:
    assert drawn(normal(TARGET), normal(TARGET), 500)[1] == 1.0


def test_an_empty_residual_is_an_error_and_no_other_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws_module, "MAX_PROPOSALS", 50)
    with pytest.raises(NumericalError, match="are both log densities normalised"):
        drawn(normal(TARGET, -3.0), normal(TARGET), 100)


@pytest.mark.parametrize("given", [[0.3, 0.7], (0.3, 0.7), {"a": 0.3, "b": 0.7}, [1.0, 1e-50]])
def test_numbers_of_python_are_taken_as_exactly_as_they_are(given: Any) -> None:
    law = as_law(given, "slow")
    assert isinstance(law, Finite)
    assert law.probs.tolist() == list(given.values() if isinstance(given, dict) else given)


def test_float32_probabilities_of_a_large_vocabulary_are_a_law() -> None:
    law = as_law(torch.randn(50_000, generator=torch.Generator().manual_seed(0)).softmax(-1), "slow")
    assert isinstance(law, Finite)
    assert float(law.probs.sum()) == pytest.approx(1.0, abs=1e-12)
