"""Speculation for any function: exact in law, by enumeration and by samples; what overlaps; whose exceptions surface.

Sampled tests reject at p < 1e-6 with fixed seeds. Planted bugs must be rejected at the same level.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import outrider
from outrider.errors import NumericalError, OutriderError, ParameterError
from outrider.speculation import laws as laws_module
from outrider.speculation import run as run_module
from outrider.speculation.gain import expected_seconds, measured_gain
from outrider.speculation.laws import Decision, Density, Finite, as_law, decide
from outrider.speculation.run import Outcome, Speculation
from outrider.speculation.workers import Context, generator
from tests import slow_functions
from tests.toys import WRONG_RULES

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


def test_equal_densities_are_always_kept() -> None:
    assert drawn(normal(TARGET), normal(TARGET), 500)[1] == 1.0


def test_an_empty_residual_is_an_error_and_no_other_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws_module, "MAX_PROPOSALS", 50)
    with pytest.raises(NumericalError, match="are both log densities normalised"):
        drawn(normal(TARGET, -3.0), normal(TARGET), 100)


# End to end, with threads.


def p_value(
    chains: Sequence[Sequence[int]], law: Callable[[int], Sequence[float]], then: Callable[[int, int], int]
) -> float:
    """Chi-square of whole chains of samples from x = 0."""
    counts = Counter(tuple(chain) for chain in chains)
    length = len(chains[0])
    got, want = [], []
    for chain in itertools.product(range(3), repeat=length):
        x, chance = 0, 1.0
        for sample in chain:
            chance *= law(x)[sample]
            x = then(x, sample)
        got.append(counts[chain])
        want.append(chance * len(chains))
    return float(stats.chisquare(got, want).pvalue)


def chains(run: Speculation, count: int = 900, length: int = 3) -> list[list[int]]:
    return [[one.sample for one in run.chain(0, length)] for _ in range(count)]


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_chains_follow_their_law(lookahead: int) -> None:
    f = slow_functions
    with outrider.speculate(f.law, f.guess, f.step, lookahead=lookahead, seed=1) as run:
        assert p_value(chains(run), f.law, f.step) > ALARM


def test_chains_with_a_wrong_rule_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    f = slow_functions
    monkeypatch.setattr(laws_module, "verify", WRONG_RULES["always accept"])
    with outrider.speculate(f.law, f.guess, f.step, lookahead=3, seed=1) as run:
        assert p_value(chains(run, 500), f.law, f.step) < ALARM


def test_chains_whose_steps_share_their_numbers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    f = slow_functions
    real = generator
    monkeypatch.setattr(run_module, "generator", lambda seed, number, part: real(seed, number // 3, part))
    with outrider.speculate(f.law, f.guess, f.step, lookahead=2, seed=1) as run:
        assert p_value(chains(run, 500), f.law, f.step) < ALARM


def test_a_consumer_with_randomness_of_its_own_keeps_the_law() -> None:
    """The next x comes of a random value: neither may know of the decision."""

    def consume(x: int, sample: int, context: Context) -> int:
        return 3 * x + (sample + int(context.rng.integers(3))) % 3

    values = []
    with outrider.speculate(
        slow_functions.law, slow_functions.guess, consume, lookahead=2, with_context=True, seed=4
    ) as run:
        for _ in range(900):
            values.append([outcome.value % 3 for outcome in run.chain(0, 3)])
    assert p_value(values, lambda _: [1 / 3] * 3, lambda x, _: x) > ALARM


def jittered(seed: int) -> tuple[Callable[..., Any], ...]:
    numbers = random.Random(seed)

    def slow(x: int) -> list[float]:
        time.sleep(numbers.random() / 500)
        return slow_functions.law(x)

    def consume(x: int, sample: int, context: Context) -> tuple[int, float]:
        time.sleep(numbers.random() / 500)
        return slow_functions.step(x, sample), context.rng.random()

    return slow, slow_functions.guess, consume


def test_the_outcome_does_not_depend_on_timing_or_lookahead() -> None:
    found: list[list[Any]] = []
    for lookahead in (1, 1, 2, 5):
        given = jittered(len(found))
        with outrider.speculate(*given, lookahead=lookahead, with_context=True, seed=9) as run:
            outcomes = [(o.sample, o.value, o.accepted) for o in run.chain(0, 40, lambda value: value[0] % 7)]
        found.append(outcomes)
    assert found[1:] == found[:-1]
    assert {True, False} == {accepted for _, _, accepted in found[0]}


def test_processes_give_what_threads_give() -> None:
    f = slow_functions
    found = []
    for workers in ("threads", "processes"):
        with outrider.speculate(f.law, f.guess, f.step, workers=workers, max_workers=2, seed=2) as run:
            found.append([(o.sample, o.value) for o in run.chain(0, 12)])
    assert found[0] == found[1]


def test_no_global_randomness_is_used() -> None:
    before = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    with outrider.speculate(slow_functions.law, slow_functions.guess, slow_functions.step, seed=2) as run:
        first, second = run(0), run(0)
    assert (first.step, second.step) == (0, 1)
    assert before == (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def test_a_generator_can_be_the_seed() -> None:
    f = slow_functions
    one, same, other = (outrider.speculate(f.law, f.guess, f.step, seed=np.random.default_rng(s)) for s in (1, 1, 2))
    assert one.seed == same.seed != other.seed


# What overlaps, what is dropped.


def test_slow_function_and_consumer_run_at_the_same_time() -> None:
    """Each waits for the other to have begun: one after the other would never end."""
    here, there = threading.Event(), threading.Event()

    def slow(x: int) -> list[float]:
        here.set()
        assert there.wait(20)
        return [1.0, 0.0]

    def consume(x: int, sample: int) -> int:
        there.set()
        assert here.wait(20)
        return sample

    with outrider.speculate(slow, lambda x: [1.0, 0.0], consume) as run:
        outcome = run(0)
    assert (outcome.value, outcome.accepted, outcome.beta) == (0, True, 1.0)


def test_further_steps_begin_on_guesses_that_are_not_decided() -> None:
    """The first law waits until the third step's consumer runs."""
    third = threading.Event()

    def slow(x: int) -> list[float]:
        assert x != 0 or third.wait(20)
        return [1.0, 0.0]

    def consume(x: int, sample: int) -> int:
        if x == 2:
            third.set()
        return x + 1

    with outrider.speculate(slow, lambda x: [1.0, 0.0], consume, lookahead=3) as run:
        assert [outcome.value for outcome in run.chain(0, 5)] == [1, 2, 3, 4, 5]


def test_a_redo_does_not_wait_for_the_consumer_of_the_guess() -> None:
    redone = threading.Event()

    def consume(x: int, sample: int) -> int:
        if sample == 0:
            assert redone.wait(20)
        else:
            redone.set()
        return sample

    with outrider.speculate(lambda x: [0.0, 1.0], lambda x: [1.0, 0.0], consume) as run:
        outcome = run(0)
    assert (outcome.value, outcome.accepted) == (1, False)


def raising_at(bad: int) -> Callable[[int, int], int]:
    def consume(x: int, sample: int) -> int:
        if sample == bad:
            raise ZeroDivisionError("inside the consumer")
        return sample

    return consume


def test_exceptions_of_a_rejected_guess_do_not_surface() -> None:
    with outrider.speculate(lambda x: [0.0, 1.0], lambda x: [1.0, 0.0], raising_at(0), lookahead=2) as run:
        assert [outcome.value for outcome in run.chain(0, 3)] == [1, 1, 1]


@pytest.mark.parametrize("guessed", [[1.0, 0.0], [0.0, 1.0]])
def test_exceptions_of_the_sample_that_counts_do_surface(guessed: list[float]) -> None:
    with outrider.speculate(lambda x: [1.0, 0.0], lambda x: guessed, raising_at(0), lookahead=2) as run:
        with pytest.raises(ZeroDivisionError, match="inside the consumer"):
            run(0)
        with pytest.raises(ZeroDivisionError):
            run(1)


@pytest.mark.parametrize("where", ["slow", "fast", "then"])
def test_exceptions_of_steps_begun_on_a_rejected_guess_do_not_surface(where: str) -> None:
    """x = 10 is only reached by the guess, and everything fails there."""
    met = threading.Event()

    def slow(x: int) -> list[float]:
        if x == 10 and where == "slow":
            met.set()
            raise ZeroDivisionError
        assert x != 0 or met.wait(20)
        return [0.0, 1.0]

    def fast(x: int) -> list[float]:
        if x == 10 and where == "fast":
            met.set()
            raise ZeroDivisionError
        return [1.0, 0.0]

    def then(value: int) -> int:
        if value == 10 and where == "then":
            met.set()
            raise ZeroDivisionError
        return value

    with outrider.speculate(slow, fast, lambda x, y: 10 if y == 0 else 20, lookahead=2, seed=1) as run:
        assert [outcome.value for outcome in run.chain(0, 1 + 1, then)] == [20, 20]


@pytest.mark.parametrize("where", ["slow", "fast", "then"])
def test_exceptions_of_steps_that_count_surface(where: str) -> None:
    def fails(here: str) -> Callable[[int], Any]:
        def function(x: int) -> Any:
            if x == 2 and here == where:
                raise ZeroDivisionError(here)
            return x if here == "then" else [1.0]

        return function

    with outrider.speculate(fails("slow"), fails("fast"), lambda x, y: x + 1, lookahead=4) as run:
        chain = run.chain(0, 6, fails("then"))
        assert [next(chain).value, next(chain).value] == [1, 2]
        with pytest.raises(ZeroDivisionError, match=where):
            next(chain)


def test_a_consumer_is_told_that_nobody_wants_its_result() -> None:
    f = slow_functions
    for workers in ("threads", "processes"):
        with outrider.speculate(
            f.second_for_certain, f.first_guessed, f.until_unwanted, workers=workers, with_context=True
        ) as run:
            start = time.monotonic()
            assert run(0).accepted is False
        assert time.monotonic() - start < 15, "closing waits for processes: the one that loops must have been told"


def test_a_chain_ends_where_it_is_told_to() -> None:
    with outrider.speculate(lambda x: [1.0], lambda x: [1.0], lambda x, y: x + 1, lookahead=3) as run:
        assert [o.value for o in run.chain(0, 50, lambda value: None if value == 4 else value)] == [1, 2, 3, 4]
        assert list(run.chain(0, 0)) == []
        assert [o.value for o in itertools.islice(run.chain(0, 50), 2)] == [1, 2]
        assert [o.value for o in run.chain(7, 1)] == [8], "a chain that was left early does not block the next"


def test_two_chains_at_once_are_refused() -> None:
    with outrider.speculate(lambda x: [1.0], lambda x: [1.0], lambda x, y: x) as run:
        chain = run.chain(0, 3)
        next(chain)
        with pytest.raises(ParameterError, match="while another one runs"):
            run(0)
        chain.close()  # type: ignore[attr-defined]
        assert run(5).value == 5


def test_a_worker_process_that_dies_is_one_clear_line() -> None:
    f = slow_functions
    with (
        outrider.speculate(f.law, f.guess, f.dies, workers="processes", max_workers=2) as run,
        pytest.raises(OutriderError, match="worker process"),
    ):
        run(0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"slow": [1.5, -0.5]}, "slow gave no probabilities"),
    "not a number": ({"fast": [float("nan"), 1.0]}, "fast gave no probabilities"),
    "another sum": ({"slow": [0.5, 0.4]}, "sum 0.9"),
    "nothing": ({"fast": []}, "a probability for each outcome"),
    "a matrix": ({"slow": torch.ones(2, 2)}, r"got shape \[2, 2\]"),
    "a word": ({"slow": "heads"}, "slow must give probabilities"),
    "of other length": ({"slow": [0.5, 0.25, 0.25]}, "over as many outcomes, got 3 and 2"),
    "of another kind": ({"slow": stats.norm()}, "laws of one kind, got density and finite"),
    "only one mapping": ({"slow": {0: 1.0}}, "must both give mappings"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_law_is_one_clear_line(name: str) -> None:
    given, message = BAD[name]
    laws = {"slow": [0.5, 0.5], "fast": [0.5, 0.5], **given}
    with (
        outrider.speculate(lambda x: laws["slow"], lambda x: laws["fast"], lambda x, y: y) as run,
        pytest.raises(OutriderError, match=message),
    ):
        run(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead": -1}, "lookahead must be a whole number in 0 … 64, got -1"),
        ({"lookahead": True}, "lookahead"),
        ({"workers": "fibres"}, "workers must be one of threads, processes, got 'fibres'"),
        ({"workers": "processes"}, "must be functions of a module"),
        ({"max_workers": 1}, "max_workers must be a whole number 2 or more, got 1"),
        ({"seed": -1}, "seed"),
        ({"slow": [0.5, 0.5]}, "slow must be a function, got list"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"slow": lambda x: [1.0], "fast": lambda x: [1.0], "consume": lambda x, y: y, **options}
    with pytest.raises(ParameterError, match=message):
        outrider.speculate(**given)


def test_float32_probabilities_of_a_large_vocabulary_are_a_law() -> None:
    law = as_law(torch.randn(50_000, generator=torch.Generator().manual_seed(0)).softmax(-1), "slow")
    assert isinstance(law, Finite)
    assert float(law.probs.sum()) == pytest.approx(1.0, abs=1e-12)


# The gain foretold.


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


def test_chains_made_before_they_begin_do_not_share_their_numbers() -> None:
    f = slow_functions
    with outrider.speculate(f.law, f.guess, f.step, lookahead=3, seed=1) as run:
        first, second = run.chain(0, 5), run.chain(0, 5)
        next(first)
        with pytest.raises(ParameterError, match="while another one runs"):
            next(second)
        assert len(list(first)) == 4


def test_continuous_and_discrete_laws_are_not_mixed() -> None:
    with (
        outrider.speculate(lambda _: stats.poisson(3), lambda _: stats.norm(3, 1.7), lambda _, y: y, seed=1) as run,
        pytest.raises(ParameterError, match="one kind, got discrete and continuous"),
    ):
        run(0)


def test_an_exception_that_can_not_be_sent_is_told_and_ends_nothing() -> None:
    f = slow_functions
    with outrider.speculate(f.fails_unsendably, f.guess, f.step, workers="processes", max_workers=2, seed=1) as run:
        for _ in range(2):
            with pytest.raises(OutriderError, match="UnsendableError: no law because of a test"):
                run(0)


def test_after_close_nothing_is_started_again() -> None:
    f = slow_functions
    run = outrider.speculate(f.law, f.guess, f.step, seed=1)
    run(0)
    run.close()
    with pytest.raises(ParameterError, match="is closed"):
        run(0)
