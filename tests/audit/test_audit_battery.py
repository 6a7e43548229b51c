"""The numbers an audit tests: uniform under the law, and a battery of tests that sees it where they are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.audit.transform import keys, transform
from outrider.audit.uniformity import REJECT, Marks, ks_p, run_battery, tokens_to_see


def test_the_transform_by_hand() -> None:
    target = torch.tensor([[0.5, 0.2, 0.2, 0.1]])
    draft = torch.tensor([[0.1, 0.4, 0.0, 0.5]])
    orders = keys(target, draft)
    half = torch.tensor([0.5], dtype=torch.float64)

    def u(order: str, token: int) -> float:
        return float(transform(target, orders[order], torch.tensor([token]), half))

    assert [u("token", token) for token in range(4)] == pytest.approx([0.25, 0.6, 0.8, 0.95])
    assert [u("target", token) for token in range(4)] == pytest.approx([0.25, 0.7, 0.7, 0.95])  # 1 and 2 are tied
    assert [u("ratio", token) for token in range(4)] == pytest.approx([0.45, 0.8, 0.1, 0.95])  # 2 (∞), 0 (5), 1 (½), 3 (⅕)


def test_where_nothing_is_proposed_the_target_gives_the_order() -> None:
    target = torch.tensor([[0.1, 0.9]])
    assert torch.equal(keys(target, torch.full((1, 2), torch.nan))["ratio"], target)


def uniform(count: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    noise = np.random.default_rng(seed)
    return noise.random(count), np.arange(count) % 4


@pytest.mark.slow
def test_the_batterys_false_alarms_are_as_stated() -> None:
    """p ≤ 0.05 in about 5 % of exact samples at most: Bonferroni is conservative. 200 samples: 20 is above 4 σ."""
    values = []
    for seed in range(200):
        u, places = uniform(1000, seed)
        marks = Marks(places, places == 3, np.arange(1000) // 50, np.arange(1000) % 50)
        values.append(run_battery({"target": u, "token": 1 - u}, marks).p)
    assert sum(p <= 0.05 for p in values) <= 20
    assert min(values) > REJECT


@pytest.mark.parametrize(
    ("bend", "part"),
    [
        (lambda u, places: u**1.2, "target order"),
        (lambda u, places: np.where(places == 2, u**1.6, u), "place 3"),
        (lambda u, places: np.where(np.arange(len(u)) % 2 == 1, (np.roll(u, 1) + 0.1 * u) % 1, u), "neighbours"),
        (lambda u, places: (np.floor(u * 20) + (u * 20 % 1) * 0.5 + (np.floor(u * 20) % 2) * 0.5) / 20, ""),
    ],
    ids=["bent", "bent at one place", "dependent", "jagged within bins"],
)
def test_the_battery_sees(bend: Callable[..., np.ndarray], part: str) -> None:
    u, places = uniform()
    bent = run_battery({"target": np.clip(bend(u, places), 0, 1)}, Marks(places))
    if part:
        assert bent.p < REJECT
        assert bent.worst is not None
        assert part in bent.worst.name
    else:  # what is below the width of a bin is too fine for it, and said to be so
        assert tokens_to_see(bend(u, places)) > 4000


@pytest.mark.parametrize("lag", [2, 3, 5])
def test_the_battery_sees_numbers_that_tokens_apart_share(lag: int) -> None:
    u, _ = uniform()
    u = u[: len(u) // (2 * lag) * 2 * lag].reshape(-1, 2, lag)
    u[:, 1] = u[:, 0]
    found = run_battery({"target": u.ravel()}, Marks(np.full(u.size, -1)))
    assert found.p < REJECT
    assert found.worst is not None
    assert f"tokens {lag} apart" in found.worst.name


def test_the_battery_sees_numbers_that_two_rows_of_a_batch_share() -> None:
    """Whole texts drawn with the same numbers, of different lengths and with tokens left out."""
    noise = np.random.default_rng(0)
    own = noise.random((30, 128))
    texts, positions = np.repeat(np.arange(60), 128), np.tile(np.arange(128), 60)
    keep = (positions < 128 - 3 * (texts % 2)) & (noise.random(len(texts)) < 0.95)
    marks = Marks(np.full(keep.sum(), -1), np.zeros(0, np.bool_), texts[keep], positions[keep])
    found = run_battery({"target": np.repeat(own, 2, axis=0).ravel()[keep]}, marks)
    assert found.p < REJECT
    assert found.worst is not None
    assert "the same position of two texts" in found.worst.name
    assert run_battery({"target": noise.random(keep.sum())}, marks).p > REJECT


def test_the_battery_sees_few_bent_bonus_tokens() -> None:
    """100 of 5,000, at several places: those of all places together show it."""
    u, places = uniform(5000)
    bonus = np.zeros(5000, np.bool_)
    bonus[::50] = True
    found = run_battery({"target": np.where(bonus, u**2, u)}, Marks(places, bonus))
    assert found.p < REJECT
    assert found.worst is not None
    assert "bonus tokens" in found.worst.name
    assert run_battery({"target": u}, Marks(places, bonus)).p > REJECT


@pytest.mark.parametrize("power", [1.05, 1.1, 1.3])
def test_tokens_to_see_is_enough(power: float) -> None:
    """Predicted from 5,000 numbers of a bent law, the tokens show it in all but a few of twenty samples."""
    u, _ = uniform(5000)
    needed = tokens_to_see(u**power)
    if needed == float("inf"):
        assert power < 1.1
        return
    seen = 0
    for seed in range(20):
        noise = np.random.default_rng(seed + 1).random(int(needed))
        seen += 80 * ks_p(noise**power) < REJECT
    assert seen >= 19
    assert tokens_to_see(u) == float("inf")


def test_a_wrong_law_is_seen_however_the_vocabulary_is_ordered() -> None:
    """The law's mass moved between two tokens that are equally likely for target and draft: only the id order shows it."""
    law = torch.full((1, 40), 1 / 40, dtype=torch.float64)
    bent: Tensor = law.clone()
    bent[0, :20] *= 1.4
    bent[0, 20:] *= 0.6
    noise = np.random.default_rng(0)
    tokens = torch.from_numpy(noise.choice(40, 2000, p=bent[0].numpy()))
    numbers = {
        order: transform(law.expand(2000, -1), key.expand(2000, -1), tokens, torch.from_numpy(noise.random(2000))).numpy()
        for order, key in keys(law, law).items()
    }
    found = run_battery(numbers, Marks(np.full(2000, -1)))
    assert found.worst is not None
    assert "token order" in found.worst.name
    assert found.p < REJECT
