"""How far a draft goes ahead in beam search, by costs that the tests make."""

from __future__ import annotations

import random
import statistics

import pytest

from outrider.beam.length import BeamLength


def searched(length: BeamLength, steps: int, chance: float, rng: random.Random, cost: tuple[float, float, float]) -> float:
    """Seconds of a search of so many steps. cost: of a drafted step, for the draft and in the pass, and of a missed one."""
    each, wider, behind = cost
    done, missed, total = 0, 0, 0.0
    while done < steps:
        n = min(length.plan(), steps - done - 1)
        accepted = 0
        while accepted < n and rng.random() < chance:
            accepted += 1
        draft = n * each + behind * missed if n else 0.0
        seconds = {name: s * rng.lognormvariate(0.0, 0.1) for name, s in (("draft", draft), ("verify", 1.0 + wider * n))}
        length.update(n, min(accepted + 1, n), accepted, seconds)
        missed, total, done = 0 if n else missed + 1, total + sum(seconds.values()), done + accepted + 1
    return total


TWO_BEAMS, EIGHT_BEAMS, AS_DEAR = (0.25, 0.08, 0.02), (0.35, 0.65, 0.08), (1.0, 1.0, 0.5)


@pytest.mark.parametrize("cost", [TWO_BEAMS, EIGHT_BEAMS, AS_DEAR])
def test_adaptive_lengths_lose_little_where_nothing_pays(cost: tuple[float, float, float]) -> None:
    rng = random.Random(1)
    for chance in (0.0, 0.3):
        ratios = [200.0 / searched(BeamLength(), 200, chance, rng, cost) for _ in range(40)]
        assert statistics.mean(ratios) > 0.96
        assert min(ratios) > 0.9


def test_adaptive_lengths_come_near_the_best_fixed_one() -> None:
    rng = random.Random(1)
    for chance in (0.7, 0.9):
        fixed = min(sum(searched(BeamLength(n), 200, chance, rng, TWO_BEAMS) for _ in range(20)) for n in (0, 1, 2, 3, 4, 8))
        adaptive = sum(searched(BeamLength(), 200, chance, rng, TWO_BEAMS) for _ in range(20))
        assert fixed < 20 * 200 / 1.25
        assert adaptive < 1.08 * fixed


def test_the_adaptive_length_settles_where_steps_are_cheapest() -> None:
    seconds, good = {"draft": 0.0, "verify": 1.0, "sampling": 0.0, "other": 0.0}, BeamLength()
    for _ in range(30):
        n = good.plan()
        good.update(n, n, n, {**seconds, "draft": 0.05 * n})
    assert good.plan() == 8


def test_a_useless_draft_is_tried_seldom_and_one_that_turns_good_is_taken() -> None:
    seconds, length, drafted = {"draft": 0.0, "verify": 1.0}, BeamLength(), []
    for i in range(600):
        n = length.plan()
        drafted += [i] * (n > 0)
        length.update(n, min(n, 1), 0, {**seconds, "draft": 0.3 * n})
    assert 6 <= len(drafted) <= 40
    assert drafted[-1] > 400
    for _ in range(2000):
        n = length.plan()
        length.update(n, n, n, {**seconds, "draft": 0.02 * n})
    assert max(length.plan() for _ in range(2)) > 2


def test_one_disturbed_pass_makes_no_draft_pay() -> None:
    length, drafted = BeamLength(), 0
    for i in range(60):
        n = length.plan()
        drafted += n
        length.update(n, min(n, 1), 0, {"draft": 0.9 * n, "verify": 9.0 if i == 20 else 1.0})
    assert drafted <= 3


def test_drafts_that_give_nothing_are_given_up() -> None:
    """A draft without a law is asked, costs its seconds, and names no hypotheses."""
    length, asked = BeamLength(), 0
    for _ in range(100):
        asked += length.plan()
        length.update(0, 0, 0, {"draft": 0.5 if length.plan() else 0.0, "verify": 1.0})
    assert 1 <= asked <= 8
