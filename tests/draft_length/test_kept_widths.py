"""What a change of a pass's width costs, and how policies heed it (`draft_length.kept_widths`)."""

from __future__ import annotations

import random

import pytest

from outrider.costs import Costs
from outrider.draft_length import AdaptiveLength, Prospect, Trial
from outrider.draft_length.kept_widths import KeptWidths
from outrider.draft_length.predicted import predicted_seconds
from outrider.draft_steps.signals import PRIORS
from outrider.models.steady_width import BUDGET, SteadyWidth
from tests.helpers.planned import plan_of, rounds_of


def test_where_a_change_of_width_takes_long_small_gains_are_left_alone() -> None:
    small, large = Prospect("d", first=0.3, later=0.3), Prospect("d", first=0.95, later=0.95)
    steady, changing = (AdaptiveLength(Costs({1: 1.0, 2: 1.0, 17: 1.0}, change=change)) for change in (0.0, 1.0))
    assert plan_of(steady, small)[1] > 1
    assert plan_of(changing, small)[1] == 1  # two tokens are as wide as a pass is anyhow; more would take .8 of one
    assert plan_of(changing, large)[1] > 1


@pytest.mark.parametrize(("accepted", "longer"), [(0.35, 1), (0.5, 2)])
def test_while_a_pass_is_filled_up_a_draft_is_charged_for_no_change_but_for_its_own_tokens(
    accepted: float, longer: int
) -> None:
    """One as long as what is kept anyhow would keep it up, round after round."""
    costs = Costs({1: 1.0, 2: 1.0, 5: 1.6, 17: 4.0}, change=1.0)
    state, offered = AdaptiveLength(costs).start(), [Prospect("d", first=accepted, later=accepted)]
    assert state.plan(offered, 64, 0).limit == 1  # as wide as passes are at least
    state.update(Trial(Prospect("other"), 4, 4, 4))  # five wide; so are the next ones
    assert state.plan(offered, 64, 0).limit == longer


def test_peeking_at_a_width_tells_the_next_and_changes_nothing() -> None:
    steady, rng = SteadyWidth(), random.Random(3)
    for _ in range(500):
        wanted = rng.choice([2, 2, 2, 3, 5, 9])
        foreseen = [steady.peek(wanted), steady.peek(wanted)]
        assert foreseen == [steady.of(wanted)] * 2


def test_what_changes_of_width_cost_is_charged_to_drafts() -> None:
    """Wrong drafts among plain rounds, each with a change there and back: they end, though their tokens are nearly free."""
    costs = Costs({1: 1.0, 17: 1.02}, change=0.7)
    state, drafted = AdaptiveLength(costs).start(), []
    for _ in range(60):
        plan = state.plan([Prospect("copy", first=0.8, later=0.9, longest=7)], 64, 0)
        drafted.append(plan.limit)
        state.update(Trial(Prospect("copy") if plan.limit else None, plan.limit, min(1, plan.limit), 0))
        for _ in range(8):
            state.plan([Prospect("none", longest=0)], 64, 0)
            state.update(Trial(None, 0, 0, 0))
    kept = KeptWidths(costs)
    wasted = sum(kept.follow(n, 0) for one in drafted for n in (one, *[0] * 8))
    assert drafted[0] > 1
    assert 1.4 <= wasted < 1.0 + 2 * 0.7 + 0.01 * 60 * 9 + 2.0
    assert sum(n > 1 for n in drafted) < 30


def test_a_model_that_is_mostly_right_shares_its_changes_of_width_among_rounds() -> None:
    """Charged to one round each they keep drafts short, as they must for copies that come and go: a fifth of the speed."""
    costs = Costs({1: 25.0, 2: 25.0, 4: 27.0, 8: 30.0, 17: 38.0}, change=14.0)
    assert KeptWidths(costs).expected(4, 0, lasting=1.0) < KeptWidths(costs).expected(4, 0) - 20.0
    model = Prospect("model", first=0.75, later=0.75, step_seconds=3.0, gated=True)

    def speed(fixed: int | None, chance: float, seed: int) -> float:
        signal = min(range(len(PRIORS)), key=lambda i: abs(PRIORS[i] - chance))  # as sure as it is right
        state, kept, luck = AdaptiveLength(costs).start(), KeptWidths(costs), random.Random(seed)
        seconds = tokens = 0.0
        for _ in range(150):
            drafted = fixed or 0
            if fixed is None:
                plan, signals = state.plan([model], 64, 0), list[int]()
                while plan.limit > len(signals) and (not plan.gated or not signals or plan.go_on(signals)):
                    signals.append(signal)
                drafted = len(signals)
            accepted = next((i for i in range(drafted) if luck.random() > chance), drafted)
            if fixed is None:
                outcome = Trial(model if drafted else None, drafted, min(accepted + 1, drafted), accepted, tuple(signals))
                state.update(outcome)
            seconds += drafted * 3.0 + costs.verify(drafted + 1, 0) + kept.follow(drafted, 0)
            tokens += accepted + 1
        return tokens / seconds

    for chance, best in ((0.75, 3), (0.9, 8)):
        adaptive, fixed = (sum(speed(length, chance, seed) for seed in range(3)) for length in (None, best))
        assert adaptive > 0.92 * fixed


def test_recorded_rounds_have_the_widths_that_passes_kept() -> None:
    """Two, five (a change), then rounds of one token filled up to five until that were too many: it falls back."""
    costs = Costs({1: 1.0, 2: 1.0, 5: 2.0}, context=10**6, change=0.5)
    records = [*rounds_of(0, drafted=0), *rounds_of(1), *rounds_of(*[0] * 11, drafted=0)]
    filled = BUDGET // 3
    seconds = 1.0 + 2.0 + filled * 2.0 + (11 - filled) * 1.0
    assert predicted_seconds(records, costs, {}, 10) == pytest.approx(seconds + 2 * 0.5)
    assert predicted_seconds(records, Costs(costs.verify_seconds), {}, 10) == pytest.approx(1.0 + 2.0 + 11 * 1.0)
