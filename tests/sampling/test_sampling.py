"""Standardisation: filters on hand-worked distributions, the stated order, agreement with transformers' own processors."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.bench.sampling_cost import realistic_logits
from outrider.errors import ParameterError
from outrider.round.alternatives import CLEAR
from outrider.sampling import (
    Context,
    SamplingSettings,
    draw,
    greedy_leads,
    greedy_tokens,
    standardize,
    truncate_device,
    truncate_host,
)
from tests.helpers.laws import by_sorting

FOUR = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)


def law(probs: Tensor, **settings: object) -> list[float]:
    chosen: dict[str, object] = {"temperature": 1.0, **settings}
    return standardize(probs.log(), SamplingSettings(**chosen)).tolist()  # type: ignore[arg-type]


def test_temperature_zero_is_one_hot_at_the_first_maximum() -> None:
    assert law(torch.tensor([0.2, 0.4, 0.4]), temperature=0.0) == [0.0, 1.0, 0.0]


def test_greedy_tokens_are_those_of_the_one_hot_law() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 2.0, 1.0], [-torch.inf] * 3, [0.0, -1.0, torch.inf]])
    for settings in (SamplingSettings(), SamplingSettings(logit_bias={1: -10.0})):
        law = standardize(logits, settings)
        tokens = greedy_tokens(logits, settings)
        assert tokens[:1].tolist() == law[:1].argmax(-1).tolist()
        assert tokens[1:].tolist() == [-1, -1, 2]
        assert law[1:].isnan().any(-1).tolist() == [True, True, False]


@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(-3.0, 3.0))
def test_greedy_tokens_of_bfloat16_are_those_of_the_same_numbers_in_float32(seed: int, rows: int, shift: float) -> None:
    """Many ties, zeros of both signs, infinities and NaN of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, 9, generator=generator) + shift).round(decimals=1).bfloat16()
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 0.0]).bfloat16()
    odd = torch.cat([odd, torch.tensor([-64], dtype=torch.int16).view(torch.bfloat16)])  # NaN with a sign
    where = torch.rand(rows, 9, generator=generator) < 0.1
    logits = torch.where(where, odd[torch.randint(len(odd), (rows, 9), generator=generator)], logits)
    got = greedy_tokens(logits.view(1, rows, 9), SamplingSettings())
    assert got.tolist() == greedy_tokens(logits.float().view(1, rows, 9), SamplingSettings()).tolist()


def test_temperature_divides_the_logits() -> None:
    squared = FOUR**2 / (FOUR**2).sum()
    assert law(FOUR, temperature=0.5) == pytest.approx(squared.tolist(), abs=1e-12)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e3, 1e6])
def test_extreme_temperatures_stay_distributions(temperature: float) -> None:
    got = torch.tensor(law(FOUR, temperature=temperature))
    assert bool(got.isfinite().all())
    assert float(got.sum()) == pytest.approx(1.0)


def test_top_k_keeps_the_largest() -> None:
    assert law(FOUR, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])


def test_top_k_keeps_ties_together() -> None:
    assert law(torch.tensor([0.4, 0.3, 0.3]), top_k=2) == pytest.approx([0.4, 0.3, 0.3])


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    assert law(FOUR, top_p=0.75) == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])
    assert law(FOUR, top_p=0.76) == pytest.approx([0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0.0])
    assert law(FOUR, top_p=1e-9) == [1.0, 0.0, 0.0, 0.0]


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert law(FOUR, min_p=0.5) == pytest.approx([2 / 3, 1 / 3, 0.0, 0.0])


def test_repetition_penalty_weakens_prompt_and_output() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0]], dtype=torch.float64)
    settings = SamplingSettings(temperature=1.0, repetition_penalty=2.0)
    got = standardize(logits, settings, [Context(torch.tensor([0, 1]), 1)])
    assert got[0].tolist() == pytest.approx(torch.tensor([1.0, -4.0, 1.0]).softmax(-1).tolist(), abs=1e-7)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64)
    settings = SamplingSettings(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    got = standardize(logits, settings, [Context(torch.tensor([3, 3, 0, 1, 1]), 2)])
    assert got[0].tolist() == pytest.approx(torch.tensor([-0.75, -1.0, 0.0, 0.0]).softmax(-1).tolist(), abs=1e-7)


def test_bias_excludes_and_prefers() -> None:
    got = law(FOUR, logit_bias={0: -math.inf, 3: math.log(2)})
    assert got == pytest.approx([0.0, 0.25 / 0.6, 0.15 / 0.6, 0.2 / 0.6])


def test_processors_see_the_tokens_and_run_before_the_temperature() -> None:
    seen = []

    def ban_last(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids.tolist())
        return scores.index_fill(-1, ids[0, -1:], -math.inf)

    settings = SamplingSettings(processors=(ban_last,))
    got = standardize(FOUR.log().unsqueeze(0), settings, [Context(torch.tensor([2, 0]), 1)])
    assert seen == [[[2, 0]]]
    assert got.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_processors_of_the_wrong_shape_are_refused() -> None:
    settings = SamplingSettings(processors=(lambda ids, scores: scores[:, :2],))
    with pytest.raises(ParameterError, match=r"scores \[1, 4\]"):
        standardize(FOUR.log().unsqueeze(0), settings, [Context(torch.tensor([0]), 1)])


def test_half_precision_logits_are_standardised_in_float32() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = standardize(logits, SamplingSettings(temperature=0.7, top_p=0.9))
    assert got.dtype == torch.float32
    assert bool(torch.equal(got, standardize(logits.float(), SamplingSettings(temperature=0.7, top_p=0.9))))


def test_order_agrees_with_transformers() -> None:
    """The same law as transformers' processors in the order in which `generate` applies them, ties aside."""
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        logits = 3 * torch.randn(1, 200, generator=generator, dtype=torch.float64)
        ids = torch.randint(200, (1, 12), generator=generator)
        theirs = logits.clone()
        for step in (
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ):
            theirs = step(ids, theirs)
        settings = SamplingSettings(repetition_penalty=1.3, temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)
        ours = standardize(logits, settings, [Context(ids[0], 12)])
        assert torch.allclose(ours, theirs.softmax(-1), atol=1e-9)


PATHS = pytest.mark.parametrize("path", [truncate_host, truncate_device], ids=["host", "device"])


@PATHS
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 5, 40, 499, 500, 900]),
    st.sampled_from([0.01, 0.3, 0.8, 0.95, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    # Nearly flat rows add up to top_p or not by their last bits (5 tokens of 500 and 0.01, say): both cuts are right.
    st.just(0.0) | st.floats(1e-3, 12.0),
)
def test_truncation_finds_what_sorting_finds(
    path: ModuleType, seed: int, top_k: int, top_p: float, min_p: float, sharpness: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(3, 500, generator=generator, dtype=torch.float64)
    logits[1, 20:] = -math.inf  # most excluded
    logits[2] = logits[2].round()  # many ties
    got = path.truncated(logits, 0.8, top_k, top_p, min_p)
    wanted = torch.stack([by_sorting(row, 0.8, top_k, top_p, min_p) for row in logits])
    assert bool(torch.equal(got > 0, wanted > 0))
    assert torch.allclose(got, wanted, rtol=1e-12, atol=0)


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_truncation_keeps_ties_and_flat_rows_whole(path: ModuleType, dtype: torch.dtype) -> None:
    probs = torch.stack([torch.full((1000,), 1e-3), torch.tensor([0.25, 0.25, 0.25, 0.25] + [0.0] * 996)]).to(dtype)
    for top_k, top_p in ((0, 0.4), (2, 1.0), (3, 0.5)):
        kept = path.truncated(probs.log(), 1.0, top_k, top_p, 0.0) > 0
        assert kept.sum(-1).tolist() == [1000, 4]


@PATHS
def test_truncation_of_a_real_vocabulary_in_float32(path: ModuleType) -> None:
    logits = realistic_logits(4)
    for temperature in (0.1, 0.8, 5.0):  # the last flat enough to lower the floors
        for top_k, top_p, min_p in ((0, 0.95, 0.0), (50, 1.0, 0.0), (50, 0.9, 0.01), (0, 1.0, 0.1), (3000, 1.0, 0.0)):
            got = path.truncated(logits, temperature, top_k, top_p, min_p)
            wanted = torch.stack([by_sorting(row.double(), temperature, top_k, top_p, min_p) for row in logits])
            assert torch.allclose(got.double(), wanted, rtol=1e-4, atol=3e-6)
            assert got.double().sum(-1).tolist() == pytest.approx([1.0] * 4, abs=1e-6)


@PATHS
def test_the_least_number_there_is_excludes_quietly(path: ModuleType) -> None:
    """What some processors set instead of -inf."""
    logits = torch.tensor([[0.0, 1.0, torch.finfo(torch.float32).min]])
    got = path.truncated(logits, 0.5, 0, 0.9999, 0.0)
    assert got[0].tolist() == pytest.approx([1 / (1 + math.exp(2)), 1 / (1 + math.exp(-2)), 0.0])


def test_a_row_without_a_distribution_is_reported_by_the_draw() -> None:
    rows = torch.stack([torch.full((4,), math.nan), torch.full((4,), -math.inf), torch.zeros(4)])
    for settings in (
        SamplingSettings(),
        SamplingSettings(temperature=1.0),
        SamplingSettings(temperature=1.0, top_p=0.5, top_k=2, min_p=0.1),
    ):
        drawn = draw(standardize(rows, settings), torch.full((3,), 0.3, dtype=torch.float64))
        assert drawn[:2].tolist() == [-1, -1]
        assert int(drawn[2]) >= 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_bad_settings_are_refused_by_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name):
        SamplingSettings(**{name: value})  # type: ignore[arg-type]


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ParameterError, match="vocabulary ends at 3"):
        law(FOUR, logit_bias={4: 1.0})


def test_a_lead_is_a_share_of_the_best_logit() -> None:
    settings = SamplingSettings()
    logits = torch.tensor([[1.0, 4.0, 3.0, -torch.inf], [-1.0, -8.0, -3.0, -9.0], [2.0, 2.0, 1.0, 0.0]])
    *certain, (_, tie) = greedy_leads(logits, settings)
    assert certain == [(1, 0.25), (0, 2 / 9)]
    assert tie == 0.0
    assert greedy_leads(torch.tensor([[2.0, -torch.inf]]), settings) == [(0, torch.inf)]
    ((_, none),) = greedy_leads(torch.tensor([[-torch.inf, -torch.inf]]), settings)
    assert not none >= CLEAR
    assert greedy_leads(logits[:1], SamplingSettings(logit_bias={1: -2.0})) == [(2, 1 / 4)]
    # One step of bfloat16 apart: a bias that takes the best to nothing does not make it a lead.
    near = torch.tensor([[20.0, 19.875, -5.0]]).bfloat16()
    assert greedy_leads(near, SamplingSettings(logit_bias={0: -19.0, 1: -19.0}))[0][1] < CLEAR
