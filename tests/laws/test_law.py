"""Exact law: the acceptance rule's law, enumerated over every draft and every outcome, is the target's to 1e-12.

The same computation, on rules with the bugs that others shipped, must see each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.acceptance.rules import verify_rejection
from outrider.acceptance.verify import Uniforms, verify, verify_on_device, verify_on_host
from outrider.errors import ParameterError
from outrider.sampling import SamplingSettings, draw
from outrider.sampling.draw import draw_on_device
from tests.helpers.enumerate import Law, Rule, round_joint
from tests.helpers.laws import EXACT, distance, sparse_rows
from tests.helpers.toys import SETTINGS, WRONG_RULES, law_of, table

Draw = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("length", range(5))
@pytest.mark.parametrize("name", SETTINGS)
def test_law_is_the_targets_for_every_setting_and_length(name: str, length: int) -> None:
    target, draft = table(1, 3), table(2, 3)
    assert distance(verify, law_of(target, SETTINGS[name]), law_of(draft, SETTINGS[name]), 3, length) < EXACT


@pytest.mark.parametrize("vocabulary", [4, 5, 6])
@pytest.mark.parametrize("seed", range(3))
def test_law_is_the_targets_for_larger_vocabularies(vocabulary: int, seed: int) -> None:
    settings = SamplingSettings(temperature=1.0)
    target, draft = table(10 + seed, vocabulary, order=1), table(20 + seed, vocabulary, order=1)
    assert distance(verify, law_of(target, settings), law_of(draft, settings), vocabulary, 2) < EXACT


@pytest.mark.parametrize("token", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_law_is_the_targets_for_point_mass_drafts(name: str, token: int) -> None:
    assert distance(verify, law_of(table(3, 3), SETTINGS[name]), token, 3, 3) < EXACT


def fixed(*probs: float) -> Law:
    row = torch.tensor(probs, dtype=torch.float64)
    return lambda new: row


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (fixed(0.2, 0.3, 0.5), fixed(0.2, 0.3, 0.5)),
        (fixed(1.0, 0.0, 0.0), fixed(0.0, 0.5, 0.5)),
        (fixed(0.5, 0.5, 0.0), fixed(0.0, 0.5, 0.5)),
        (fixed(0.0, 0.0, 1.0), fixed(0.0, 0.0, 1.0)),
        (fixed(0.0, 0.0, 1.0), fixed(1.0, 0.0, 0.0)),
        (fixed(0.5, 0.5, 0.0), fixed(1 / 3, 1 / 3, 1 / 3)),
        (fixed(1e-300, 1.0, 0.0), fixed(1.0, 1e-300, 0.0)),
    ],
    ids=["p = q", "disjoint", "overlapping", "same point", "other point", "draft wider", "extreme"],
)
def test_law_is_the_targets_for_truncated_and_disjoint_supports(target: Law, draft: Law) -> None:
    assert distance(verify, target, draft, 3, 3) < EXACT


def test_law_holds_when_draft_and_target_are_standardised_differently() -> None:
    """Leviathan 5: the draft may sample otherwise than the target, if its own law is the one that is tested."""
    target = law_of(table(1, 3), SamplingSettings(temperature=1.0))
    draft = law_of(table(2, 3), SamplingSettings(temperature=0.3, top_k=2))
    assert distance(verify, target, draft, 3, 3) < EXACT


@pytest.mark.parametrize("name", WRONG_RULES)
def test_planted_bugs_in_the_rule_are_seen(name: str) -> None:
    settings = SamplingSettings(temperature=1.0)
    target, draft = law_of(table(1, 3), settings), law_of(table(2, 3), settings)
    assert distance(WRONG_RULES[name], target, draft, 3, 2) > 1e-3


def test_a_draft_scored_before_its_processors_is_seen() -> None:
    """Drawn with top-k 2, tested against the law without it."""
    plain, cut = SamplingSettings(temperature=1.0), SamplingSettings(temperature=1.0, top_k=2)
    target, drawn, claimed = law_of(table(1, 3), cut), law_of(table(2, 3), cut), law_of(table(2, 3), plain)
    assert distance(lying(claimed), target, drawn, 3, 1) > 1e-3


def test_an_argmax_draft_scored_with_softmax_is_seen() -> None:
    settings = SamplingSettings(temperature=1.0)
    drawn, claimed = law_of(table(2, 3), SamplingSettings()), law_of(table(2, 3), settings)
    assert distance(lying(claimed), law_of(table(1, 3), settings), drawn, 3, 1) > 1e-3


def lying(claimed: Law) -> Rule:
    """The right rule, given a law that the draft token was not drawn from."""

    def rule(target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms) -> object:
        laws = torch.stack([torch.stack([claimed(tuple(row[:j])) for j in range(len(row))]) for row in tokens.tolist()])
        return verify(target, laws, tokens, randomness)

    return rule  # type: ignore[return-value]


def test_plain_rejection_sampling_is_exact_too() -> None:
    settings = SamplingSettings(temperature=1.0)
    target, draft = law_of(table(1, 3), settings), law_of(table(2, 3), settings)
    assert distance(verify_rejection, target, draft, 3, 3) < EXACT


def test_a_token_that_stands_for_no_law_is_not_accepted() -> None:
    """A draft law of NaN can't be drawn from; the token in its place has no mass in it."""
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]])
    for law in ([0.0, 0.0, torch.nan], [torch.nan] * 3):
        for uniform in (0.0, 0.3):
            randomness = Uniforms(torch.tensor([[uniform]]), torch.tensor([uniform]))
            verdict = verify(target, torch.tensor([[law]]), torch.tensor([[0]]), randomness)
            assert verdict.num_accepted.tolist() == [0]
            assert verdict.next_token.tolist() == [0]


@pytest.mark.parametrize("vocabulary", [2, 3, 7, 64])
def test_draw_has_the_law_of_its_weights(vocabulary: int) -> None:
    """Its breakpoints are the cumulative weights, to the last bits."""
    weights = table(5, vocabulary, order=0).probs_after([]) * 3.7
    weights[vocabulary // 2] = 0.0
    law = round_joint(
        verify,
        lambda new: weights,
        None,
        vocabulary,
        0,
    )
    assert float((law - weights / weights.sum()).abs().max()) < EXACT
    assert float(law[vocabulary // 2]) == 0.0


def draw_on_host(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Row by row whatever the vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.support.device_data.ROW_BY_ROW_FROM", 0)
        return draw(weights, uniforms)


DRAWS = pytest.mark.parametrize("pick", [draw_on_host, draw_on_device], ids=["host", "device"])


@pytest.mark.parametrize("vocabulary", [300, 1025, 1088, 5000, 151_936])
@pytest.mark.parametrize("support", [0.01, 0.5])
@DRAWS
def test_draw_is_inversion_of_the_cumulative_sum(pick: Draw, support: float, vocabulary: int) -> None:
    """Large vocabularies are searched in two steps, small supports picked out; the breakpoints are the same to rounding."""
    generator = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64).pow(8)
    weights[torch.rand(vocabulary, generator=generator) >= support] = 0.0
    cumulative = weights.cumsum(-1)
    uniforms = torch.cat([torch.rand(400, generator=generator, dtype=torch.float64), torch.tensor([0.0, 1.0 - 2.0**-53])])
    drawn = pick(weights.expand(len(uniforms), -1), uniforms)
    point = uniforms * cumulative[-1]
    above = cumulative[drawn]
    below = above - weights[drawn]
    slack = 1e-13 * float(cumulative[-1])
    assert bool((weights[drawn] > 0).all())
    assert bool(((point < above + slack) & (point >= below - slack)).all())


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-53])
@DRAWS
def test_draw_never_gives_a_token_of_weight_zero(pick: Draw, uniform: float) -> None:
    for dtype in (torch.float32, torch.float64):
        weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 1e-30, 0.0, 0.0]], dtype=dtype)
        drawn = pick(weights, torch.full((2,), uniform, dtype=torch.float64))
        assert bool((weights.gather(-1, drawn.unsqueeze(-1)) > 0).all())


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_draw_survives_a_scan_that_steps_up_over_zeros(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel scans (CUDA) may round so; planted here."""
    weights = torch.zeros(1, vocabulary)
    weights[0, ::97] = 0.3
    real = Tensor.cumsum
    monkeypatch.setattr(Tensor, "cumsum", lambda x, dim: real(x + torch.where(x == 0, 1e-3, 0.0), dim))
    uniforms = torch.linspace(0, 1 - 2**-53, 2000, dtype=torch.float64)
    drawn = draw_on_device(weights.expand(len(uniforms), -1), uniforms)
    assert bool((drawn >= 0).all())
    assert bool((drawn % 97 == 0).all())


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_rows_are_decided_alike_on_host_and_device(seed: int, vocabulary: int, length: int, point_mass: bool) -> None:
    given = sparse_rows(seed, vocabulary, length, point_mass, torch.float64)
    host, device = verify_on_host(*given), verify_on_device(*given)
    assert host.num_accepted.tolist() == device.num_accepted.tolist()
    assert host.next_token.tolist() == device.next_token.tolist()


@pytest.mark.parametrize("point_mass", [False, True], ids=["model draft", "point mass"])
def test_rows_without_a_law_are_told_apart_on_host_and_device(point_mass: bool) -> None:
    """NaN, nothing, what the draft can't have drawn, and types in which laws may come."""
    nan, good = [torch.nan] * 3, [0.5, 0.25, 0.25]
    cases = [(good, good, nan), (nan, good, good), (good, nan, good), ([0.0] * 3, good, good), (good, [0.0] * 3, good)]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        target = torch.tensor([[first, last] for first, _, last in cases], dtype=dtype)
        draft = None if point_mass else torch.tensor([[offered] for _, offered, _ in cases], dtype=dtype)
        count = len(cases)
        for uniform in (0.0, 0.6):
            randomness = Uniforms(torch.full((count, 1), uniform).double(), torch.full((count,), 0.7).double())
            given = (target, draft, torch.ones(count, 1, dtype=torch.long), randomness, torch.ones(count, dtype=torch.long))
            host, device = verify_on_host(*given), verify_on_device(*given)
            assert host.num_accepted.tolist() == device.num_accepted.tolist()
            assert host.next_token.tolist() == device.next_token.tolist()
            assert -1 in host.next_token.tolist()


@pytest.mark.parametrize(
    ("token", "drafted", "refused"), [(-1, 1, "draft_tokens"), (3, 1, "draft_tokens"), (0, 2, "num_drafted")]
)
@pytest.mark.parametrize("rows_from", [0, 10**9], ids=["row by row", "at once"])
def test_tokens_and_counts_out_of_range_are_refused(
    rows_from: int, token: int, drafted: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.support.device_data.ROW_BY_ROW_FROM", rows_from)
    uniforms = Uniforms(torch.zeros(1, 1).double(), torch.zeros(1).double())
    allowed = {"draft_tokens": f"0 … 2, got {token}", "num_drafted": f"0 … 1, got {drafted}"}[refused]
    with pytest.raises(ParameterError, match=f"{refused} must be in {allowed}"):
        verify(torch.full((1, 2, 3), 1 / 3), None, torch.tensor([[token]]), uniforms, torch.tensor([drafted]))


@pytest.mark.parametrize("point_mass", [False, True], ids=["model draft", "point mass"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_law_is_the_targets_row_by_row(name: str, point_mass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a real vocabulary on a CPU, which is not that of the toys above."""
    monkeypatch.setattr("outrider.support.device_data.ROW_BY_ROW_FROM", 0)
    target, draft = table(1, 3), table(2, 3)
    proposed = 1 if point_mass else law_of(draft, SETTINGS[name])
    assert distance(verify, law_of(target, SETTINGS[name]), proposed, 3, 2) < EXACT


@DRAWS
def test_draw_takes_every_kind_of_number(pick: Draw) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        weights = torch.tensor([[0.25, 0.25, 0.5]], dtype=dtype)
        assert pick(weights, torch.tensor([0.6], dtype=torch.float64)).tolist() == [2]


@DRAWS
def test_draw_reports_what_is_no_distribution(pick: Draw) -> None:
    rows = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [0.5, 0.5]])
    uniforms = torch.full((4,), 0.4, dtype=torch.float64)
    assert pick(rows, uniforms).tolist() == [-1, -1, -1, 0]
    wide = torch.nn.functional.pad(rows, (0, 4998))
    assert pick(wide, uniforms).tolist() == [-1, -1, -1, 0]
