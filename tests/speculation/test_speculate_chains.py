"""Speculation for any function, whole chains: exact in law and the same whatever the timing, with threads and processes.

Sampled tests reject at p < 1e-6 with fixed seeds. Planted bugs must be rejected at the same level.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import outrider
from outrider.speculation import laws as laws_module
from outrider.speculation import run as run_module
from outrider.speculation.run import Speculation
from outrider.speculation.workers import Context, generator
from tests.helpers import slow_functions
from tests.helpers.marks import slow
from tests.helpers.toys import WRONG_RULES

ALARM = 1e-6


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


@pytest.mark.parametrize("lookahead", [slow(0), slow(1), 3])
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
    monkeypatch.setattr(run_module, "generator", lambda seed, number, *key: real(seed, number // 3, *key))
    with outrider.speculate(f.law, f.guess, f.step, lookahead=2, seed=1) as run:
        assert p_value(chains(run, 500), f.law, f.step) < ALARM


def test_no_number_serves_twice_whatever_is_given_up() -> None:
    """After rejections, and where a chain is closed before its end and another begun."""
    seen: list[float] = []

    def consume(x: int, sample: int, context: Context) -> int:
        seen.append(float(context.rng.random()))
        return slow_functions.step(x, sample)

    functions = slow_functions.law, slow_functions.guess, consume
    with outrider.speculate(*functions, lookahead=3, with_context=True, seed=6) as run:
        for _ in range(40):
            chain = run.chain(0, 6)
            next(chain)
            chain.close()  # type: ignore[attr-defined]
            assert len([*run.chain(0, 3)]) == 3
    assert len(set(seen)) == len(seen) > 40 * 4


@pytest.mark.slow
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
