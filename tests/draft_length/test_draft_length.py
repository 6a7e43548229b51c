"""Draft-length policies: hand-worked plans, learning, and the figures worked out from recorded rounds."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import theory
from outrider.costs import Costs, DraftSeconds
from outrider.draft_length import AdaptiveLength, FixedLength, OptimalLength, Prospect, Trial, optimal_length
from outrider.draft_length.adaptive import expected
from outrider.draft_length.predicted import oracle_seconds, plain_seconds, predicted_seconds
from outrider.draft_steps.signals import EDGES, token_signals
from outrider.errors import ParameterError
from tests.helpers.planned import FLAT, LINEAR, plan_of, rounds_of


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("c", [0.02, 0.1, 0.5, 2.0])
def test_the_optimal_length_is_leviathans_where_verification_is_flat(alpha: float, c: float) -> None:
    assert optimal_length(alpha, FLAT, DraftSeconds(c), longest=16) == theory.best_gamma(alpha, c, max_gamma=16)


def test_the_optimal_length_heeds_measured_costs() -> None:
    assert optimal_length(0.9, LINEAR, DraftSeconds(0.1)) == 0
    steps = Costs({1: 1.0, 4: 1.0, 5: 3.0, 17: 3.0})
    assert optimal_length(0.8, steps, DraftSeconds(0.01)) in (3, 16)
    assert optimal_length(0.6, steps, DraftSeconds(0.01)) == 3
    with pytest.raises(ParameterError, match="alpha must be in"):
        OptimalLength(1.2)


def test_a_fixed_length_keeps_to_the_room_there_is() -> None:
    for room, longest, wanted in ((9, 64, 5), (3, 64, 3), (9, 2, 2), (0, 64, 0)):
        assert FixedLength(5).plan([Prospect("d", longest=longest)], room, 0).limit == wanted


@pytest.mark.parametrize(("first", "later", "length"), [(0.3, 0.8, 1), (0.3, 0.8, 4), (1.0, 1.0, 5), (0.0, 1.0, 3)])
def test_expected_tokens_are_the_sum(first: float, later: float, length: int) -> None:
    assert expected(first, later, length) == pytest.approx(sum(first * later**i for i in range(length)))


def test_drafting_goes_as_far_as_it_pays_and_no_further() -> None:
    assert plan_of(AdaptiveLength(FLAT), Prospect("free")) == (0, 16)
    assert plan_of(AdaptiveLength(LINEAR), Prospect("free")) == (0, 0)
    assert plan_of(AdaptiveLength(FLAT), Prospect("dear", step_seconds=2.0)) == (0, 0)
    assert plan_of(AdaptiveLength(FLAT), Prospect("free"), room=3) == (0, 3)
    assert plan_of(AdaptiveLength(FLAT), Prospect("none", longest=0)) == (0, 0)
    _, some = plan_of(AdaptiveLength(FLAT), Prospect("d", first=0.8, later=0.8, step_seconds=0.1))
    assert some == theory.best_gamma(0.8, 0.1)


def test_the_best_prospect_is_chosen_and_starting_up_counts() -> None:
    good, cheap = Prospect("good", first=0.9, later=0.9, step_seconds=0.4), Prospect("cheap", first=0.3, later=0.3)
    copy = Prospect("copy", first=0.95, later=0.95)
    assert plan_of(AdaptiveLength(FLAT), good, cheap)[0] == 0
    assert plan_of(AdaptiveLength(FLAT), good, cheap, copy)[0] == 2
    late = Prospect("good", first=0.9, later=0.9, step_seconds=0.4, start_seconds=5.0)
    assert plan_of(AdaptiveLength(FLAT), late, cheap)[0] == 1


def test_a_bump_in_the_costs_is_looked_over() -> None:
    """Four tokens are cheaper than three on some engines: one must not stop before the bump."""
    bumpy = Costs({1: 1.0, 2: 1.6, 3: 1.7, 4: 1.1, 5: 3.0, 17: 9.0})
    assert plan_of(AdaptiveLength(bumpy), Prospect("d", first=0.8, later=0.8)) == (0, 3)
    plan = AdaptiveLength(bumpy).start().plan([Prospect("d", first=0.8, later=0.8, gated=True)], 16, 0)
    assert plan.gated
    assert plan.go_on([6])  # from two to three: dearer, but four follow
    assert not plan.go_on([6, 6, 6])


def test_long_contexts_make_wide_passes_dear() -> None:
    costs = Costs({1: 1.0, 17: 1.2}, {1: 0.0, 17: 0.01})
    prospect = Prospect("d", first=0.6, later=0.6)
    assert plan_of(AdaptiveLength(costs), prospect, context=64)[1] >= 4
    assert plan_of(AdaptiveLength(costs), prospect, context=5000)[1] == 0


def test_a_sure_draft_goes_on_and_an_unsure_one_stops() -> None:
    plan = AdaptiveLength(FLAT).start().plan([Prospect("d", step_seconds=0.3, gated=True)], 16, 0)
    assert plan.go_on([7, 7, 7])
    assert not plan.go_on([7, 0])
    assert not plan.go_on([0])
    assert not plan.go_on([7] * 16)


def test_signals_are_learned() -> None:
    """Class 7 turns out worthless and class 0 certain; the decisions follow, and the estimates are calibrated."""
    state = AdaptiveLength(FLAT).start()
    prospect = Prospect("d", step_seconds=0.3, gated=True)
    chance = random.Random(0)
    for _ in range(200):
        state.plan([prospect], 16, 0)
        state.update(Trial(prospect, 1, 1, int(chance.random() < 0.1), [7]))
        state.update(Trial(prospect, 2, 2, 2, [0, 0]))
    plan = state.plan([prospect], 16, 0)
    assert plan.go_on([0, 0])
    assert not plan.go_on([0, 7])
    assert state._of_signal(prospect, 7).value == pytest.approx(0.1, abs=0.12)  # type: ignore[attr-defined]
    assert state._of_signal(prospect, 0).value > 0.95  # type: ignore[attr-defined]


def test_a_fixed_length_with_several_prospects_is_kept() -> None:
    policy = AdaptiveLength(LINEAR, only=3)
    assert plan_of(policy, Prospect("a", first=0.2, later=0.2), Prospect("b")) == (1, 3)


def test_a_fixed_length_is_as_much_as_there_is() -> None:
    """A copy of two tokens is drafted though three are wanted, and so is what fits before the end of a text."""
    policy = AdaptiveLength(LINEAR, only=3)
    short = Prospect("b", longest=2)
    assert plan_of(policy, Prospect("a", first=0.2, later=0.2), short) == (1, 2)
    assert plan_of(policy, Prospect("a", longest=0), Prospect("b", longest=0))[1] == 0
    plan = policy.start().plan([Prospect("a", first=0.2, later=0.2), Prospect("b")], 1, 10)
    assert (plan.prospect, plan.limit) == (1, 1)


def test_recorded_rounds_by_the_tables() -> None:
    costs = Costs({1: 1.0, 5: 2.0}, {1: 0.01, 5: 0.02}, context=0)
    records = rounds_of(2, 0)
    # Contexts 10 and 13: five tokens each take 2 + 0.02 · context; the drafts 4 · 0.1 each.
    assert predicted_seconds(records, costs, {"d": DraftSeconds(0.1)}, 10) == pytest.approx(2.2 + 0.4 + 2.26 + 0.4)
    assert plain_seconds(records, costs, 10) == pytest.approx(1.1 + 1.11 + 1.12 + 1.13)
    three = 1.5 + 0.015 * 10
    assert oracle_seconds(records, costs, DraftSeconds(0.1), 10) == pytest.approx(three + 0.2 + 1.13)


def test_the_oracle_is_never_slower_than_plain_decoding() -> None:
    records = rounds_of(4, 3, 0, 1)
    assert oracle_seconds(records, LINEAR, DraftSeconds(1.0), 5) == pytest.approx(plain_seconds(records, LINEAR, 5))
    assert oracle_seconds(records, FLAT, DraftSeconds(0.1), 5) < plain_seconds(records, FLAT, 5)


@given(st.integers(0, 10**6), st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
def test_signals_are_the_same_on_host_and_device(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(6, 40, generator=generator) * 4).to(dtype)
    logits[0, 5:] = -torch.inf
    tokens = logits.argmax(-1)
    tokens[1] = 7
    device = token_signals(logits, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.support.device_data.ROW_BY_ROW_FROM", 0)
        assert token_signals(logits, tokens) == device


def test_a_drafts_law_that_is_none_has_some_signal() -> None:
    for odd in (torch.full((1, 2000), -torch.inf), torch.full((1, 2000), torch.nan)):
        assert 0 <= token_signals(odd, torch.tensor([3]))[0] <= len(EDGES)
