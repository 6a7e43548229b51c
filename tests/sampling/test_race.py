"""The exponential race: its numbers are Philox's, the kernels and torch give the same winners, and these follow the law.

False-alarm rate: each statistical test rejects at p < 1e-6; the keys are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from outrider.acceptance.by_position import verify_by_position
from outrider.kernels.sampling import sampling_kernels
from outrider.sampling import draw_each, race
from outrider.sampling.race import _philox, race_on_device
from outrider.theory import acceptance_probability, race_acceptance_probability
from tests.helpers.positions import stream_by_position

ALARM = 1e-6
KEYS = [(7919 * i + 3) * 10**14 % 2**63 for i in range(20_000)]


def laws(rows: int, vocabulary: int, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(rows, vocabulary, generator=generator)).softmax(-1)


def test_numbers_are_philoxs() -> None:
    """The known answer of Random123 for the counter and the key 0: tokens 0, 8, 16 and 24 have the words of block 0."""
    nothing = torch.zeros(1, dtype=torch.long)
    words = _philox(nothing, nothing, torch.arange(8))[0, 0]
    assert [hex(words[token]) for token in (0, 8, 16, 24)] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 8, 31, 32, 33, 100, 5000, 49_153])
@pytest.mark.parametrize("sharpness", [0.0, 2.0, 30.0])
def test_kernels_and_torch_agree(vocabulary: int, sharpness: float) -> None:
    if sampling_kernels() is None:
        pytest.skip("no kernels here")
    weights = laws(60, vocabulary, sharpness=sharpness)
    weights[::3, ::2] = 0.0  # laws that are cut
    weights[1] *= 1e-30
    weights[2] *= 1e30
    weights[4] = 0.0
    weights[5, vocabulary // 2] = math.nan
    weights[7, -1] = math.inf
    keys, positions = KEYS[:60], [2**31 - 30 + i for i in range(60)]
    found = race(weights, keys, positions)
    assert torch.equal(found, race_on_device(weights, torch.tensor(keys), torch.tensor(positions)))
    assert found[[4, 5, 7]].tolist() == [-1] * 3
    rows = [row for row in range(60) if found[row] >= 0]
    assert bool((weights[rows, found[rows]] > 0).all())


@pytest.mark.parametrize(
    ("key", "position", "lane"), [(219753284541457148, 3, 20), (451308555153444122, 2, 28), (1801279149189219270, 3, 13)]
)
def test_what_lies_behind_a_row_never_wins(key: int, position: int, lane: int) -> None:
    """Keys by which a lane behind five tokens, one that fills a vector up, has a number of 0: one of 17 million does."""
    words = _philox(torch.tensor([key]), torch.tensor([position]), torch.arange(8))[0, 0]
    assert int(words[lane]) < 256
    weights = laws(8, 5)  # the next rows' lie in those lanes
    want = race_on_device(weights[:1], torch.tensor([key]), torch.tensor([position]))
    assert torch.equal(race(weights[:1], [key], [position]), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_winners_follow_the_law(dtype: torch.dtype) -> None:
    weights = laws(1, 40, sharpness=1.5).to(dtype)
    found = race(weights.expand(len(KEYS), -1).contiguous(), KEYS, [5] * len(KEYS))
    counts = found.bincount(minlength=40)
    expected = weights[0].double() / weights[0].double().sum() * len(KEYS)
    assert stats.chisquare(counts.numpy(), (expected * len(KEYS) / expected.sum()).numpy()).pvalue > ALARM


def test_rare_tokens_have_their_share() -> None:
    """Half of a law is shared by tokens of a probability of 1e-5 each, whose numbers must be told apart."""
    weights = torch.full((1, 50_001), 1e-5)
    weights[0, 0] = 0.5
    found = torch.cat([race(weights.expand(500, -1), KEYS[i : i + 500], [9] * 500) for i in range(0, 8000, 500)])
    rare = found[found > 0]
    assert stats.binomtest(len(rare), len(found), 0.5).pvalue > ALARM
    assert stats.kstest((rare.double() / 50_001).numpy(), "uniform").pvalue > ALARM


def test_positions_and_keys_are_independent() -> None:
    """Winners at two positions of one key, and of two keys at one position, like the pairs of independent draws."""
    weights = laws(1, 5, sharpness=1.0)
    wide = weights.expand(len(KEYS), -1).contiguous()
    here, there = race(wide, KEYS, [5] * len(KEYS)), race(wide, KEYS, [6] * len(KEYS))
    for pairs in (here * 5 + there, here[:-1] * 5 + here[1:]):
        expected = torch.outer(weights[0], weights[0]).flatten().double() * len(pairs)
        found = pairs.bincount(minlength=25)
        assert stats.chisquare(found.numpy(), (expected * len(pairs) / expected.sum()).numpy()).pvalue > ALARM


@pytest.mark.parametrize("sharpness", [0.5, 2.0])
def test_two_races_agree_as_often_as_theory_says(sharpness: float) -> None:
    target, draft = laws(1, 30, 1, sharpness), laws(1, 30, 2, sharpness)
    wide = [law.expand(len(KEYS), -1).contiguous() for law in (target, draft)]
    drafted = race(wide[1], KEYS, [5] * len(KEYS))
    verdict = verify_by_position(
        torch.stack([wide[0], wide[0]], dim=1), drafted.unsqueeze(1), KEYS, [5] * len(KEYS), torch.ones(len(KEYS)).long()
    )
    agreed = int(verdict.num_accepted.sum())
    predicted = float(race_acceptance_probability(target, draft))
    assert stats.binomtest(agreed, len(KEYS), predicted).pvalue > ALARM


def test_agreement_lies_between_its_bounds() -> None:
    target, draft = laws(300, 60, 1, 3.0), laws(300, 60, 2, 3.0)
    draft[:50] = target[:50]
    draft[50:100, ::2] = 0.0
    draft[50:100] /= draft[50:100].sum(-1, keepdim=True)
    alpha, agreed = acceptance_probability(target, draft).double(), race_acceptance_probability(target, draft)
    assert bool((agreed <= alpha + 1e-6).all())
    assert bool((agreed >= alpha / (2 - alpha) - 1e-6).all())
    assert torch.allclose(agreed[:50], torch.ones(50, dtype=torch.float64), atol=1e-6)
    p, q = target[60].double(), draft[60].double()
    plain = sum(1 / float(torch.maximum(p / p[x], q / q[x]).sum()) for x in range(60) if q[x] > 0)
    assert float(agreed[60]) == pytest.approx(plain, abs=1e-6)
    certain = torch.zeros(1, 60).index_fill_(1, torch.tensor([3]), 1.0)
    assert float(race_acceptance_probability(target[:1], certain)) == pytest.approx(float(target[0, 3]), abs=1e-6)


def test_a_cut_vocabulary_races_with_the_tokens_that_its_columns_stand_for() -> None:
    ids = torch.tensor([3, 4, 17, 30, 31, 90])
    law = laws(50, len(ids))
    streams = [stream_by_position(5, i) for i in range(50)]
    positions = list(range(50))
    wide = torch.zeros(50, 100).index_copy_(1, ids, law)
    columns = draw_each(law, streams, positions, ids, 100)
    assert torch.equal(ids[columns], draw_each(wide, streams, positions))
