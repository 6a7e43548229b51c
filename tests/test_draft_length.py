"""Draft-length policies: hand-worked plans, learning, probing, and the figures worked out from recorded rounds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider import theory
from outrider.costs import Costs, DraftSeconds
from outrider.draft_length import AdaptiveLength, FixedLength, OptimalLength, Prospect, Trial, optimal_length
from outrider.draft_length.account import Account
from outrider.draft_length.adaptive import expected
from outrider.draft_length.base import Finding
from outrider.draft_length.foretold import Foretold
from outrider.draft_length.kept_widths import KeptWidths
from outrider.draft_length.predicted import oracle_seconds, plain_seconds, predicted_seconds
from outrider.draft_length.signals import EDGES, PRIORS, token_signals
from outrider.draft_length.tries import Tries
from outrider.errors import ParameterError
from outrider.models.openvino.steady import BUDGET, SteadyWidth
from outrider.records import Round

FLAT = Costs({1: 1.0, 17: 1.0})
LINEAR = Costs({1: 1.0, 17: 17.0})


def plan_of(policy: AdaptiveLength, *prospects: Prospect, room: int = 64, context: int = 0) -> tuple[int, int]:
    plan = policy.start().plan(prospects, room, context)
    return plan.prospect, plan.limit


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


@pytest.mark.parametrize("costs", [FLAT, LINEAR, Costs({1: 1.0, 2: 1.3, 17: 3.0})], ids=["flat", "linear", "between"])
@pytest.mark.parametrize("step", [0.0, 0.2, 1.0])
def test_the_loss_to_useless_drafts_is_bounded(costs: Costs, step: float) -> None:
    """Everything is rejected: what drafting costs, by the tables, stays near the share set aside for probes."""
    state = AdaptiveLength(costs).start()
    prospects = [Prospect("a", step_seconds=step, gated=True), Prospect("b", step_seconds=2 * step, start_seconds=step)]
    spent = 0.0
    rounds = 1000
    for _ in range(rounds):
        plan = state.plan(prospects, 64, 0)
        drafted = 0
        while drafted < plan.limit and (drafted == 0 or not plan.gated or plan.go_on([4] * drafted)):
            drafted += 1
        chosen = prospects[plan.prospect]
        spent += costs.verify(drafted + 1) + (chosen.start_seconds + drafted * chosen.step_seconds if drafted else 0.0)
        state.update(Trial(chosen if drafted else None, drafted, min(1, drafted), 0, [4] * drafted))
    assert spent < 1.04 * rounds * costs.verify(1)


def test_a_few_wrong_first_guesses_lose_no_more_than_a_pass_and_a_draft() -> None:
    """Every token of a draft costs a pass, and every kind of match promises much and keeps nothing."""
    costs = LINEAR
    state = AdaptiveLength(costs).start()
    spent, worst, rounds = 0.0, 0.0, 200
    for i in range(rounds):
        about = Prospect("copy", kind=i % 8, first=0.93, later=0.95)
        drafted = state.plan([about], 64, 0).limit
        spent += costs.verify(drafted + 1)
        worst = max(worst, costs.verify(drafted + 1) - costs.verify(1))
        state.update(Trial(about if drafted else None, drafted, min(1, drafted), 0))
    assert worst > 0
    assert spent - rounds * costs.verify(1) < costs.verify(1) + worst + 0.04 * spent


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


def rounds_of(*accepted: int, drafted: int = 4) -> list[Round]:
    return [Round(tuple(range(a + 1)), drafted, a, "d") for a in accepted]


def test_recorded_rounds_by_the_tables() -> None:
    costs = Costs({1: 1.0, 5: 2.0}, {1: 0.01, 5: 0.02}, context=0)
    records = rounds_of(2, 0)
    # Contexts 10 and 13: five tokens each take 2 + 0.02 · context; the drafts 4 · 0.1 each.
    assert predicted_seconds(records, costs, {"d": DraftSeconds(0.1)}, 10) == pytest.approx(2.2 + 0.4 + 2.26 + 0.4)
    assert plain_seconds(records, costs, 10) == pytest.approx(1.1 + 1.11 + 1.12 + 1.13)
    three = 1.5 + 0.015 * 10
    assert oracle_seconds(records, costs, DraftSeconds(0.1), 10) == pytest.approx(three + 0.2 + 1.13)


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


def test_the_oracle_is_never_slower_than_plain_decoding() -> None:
    records = rounds_of(4, 3, 0, 1)
    assert oracle_seconds(records, LINEAR, DraftSeconds(1.0), 5) == pytest.approx(plain_seconds(records, LINEAR, 5))
    assert oracle_seconds(records, FLAT, DraftSeconds(0.1), 5) < plain_seconds(records, FLAT, 5)


def test_foretold_tokens_are_compared_with_what_came() -> None:
    foretold, copy = Foretold(), Prospect("copy", kind=2, foretold=True)
    foretold.add(copy, [7, 8, 9], start=3)
    assert foretold.compare([0, 0, 0]) == []
    assert foretold.compare([0, 0, 0, 7]) == [Finding(copy, 3, 0, True)]
    foretold.add(copy, [8, 1, 9], start=4)
    found = foretold.compare([0, 0, 0, 7, 8, 1])
    first = [Finding(copy, 3, 1, True), Finding(copy, 3, 2, False)]
    assert found == [*first, Finding(copy, 4, 0, True), Finding(copy, 4, 1, True, again=True)]
    foretold.add(copy, [5], start=6)  # nothing that counts in full is followed any more
    assert foretold.compare([0, 0, 0, 7, 8, 1, 5, 5]) == [Finding(copy, 4, 2, False, again=True), Finding(copy, 6, 0, True)]
    assert foretold.compare([0, 0, 0, 7, 8, 1, 5, 5, 5]) == []


def test_foretold_tokens_are_read_no_further_than_they_turn_out_right() -> None:
    """An n-gram's guesses are looked up one by one: most are never asked for."""
    read: list[int] = []

    def guesses() -> Iterator[int]:
        for token in (7, 8, 9):
            read.append(token)
            yield token

    foretold, guess = Foretold(), Prospect("guess", foretold=True)
    foretold.add(guess, guesses(), start=3)
    foretold.compare([0, 0, 0])
    assert read == [7]
    assert foretold.compare([0, 0, 0, 7]) == [Finding(guess, 3, 0, True)]
    assert read == [7, 8]
    assert foretold.compare([0, 0, 0, 7, 1, 9]) == [Finding(guess, 3, 1, False)]
    assert read == [7, 8]


def test_a_draft_tried_in_vain_is_tried_ever_more_seldom() -> None:
    """Free by the tables, and never right; it is still tried often enough to be found when it turns good."""
    free, useless = AdaptiveLength(Costs({1: 1.0, 17: 1.0}), margin=0.02).start(), Prospect("d", first=0.01, later=0.01)

    def rounds(count: int, accepted: int) -> list[int]:
        drafted = []
        for _ in range(count):
            length = free.plan([useless], 64, 0).limit
            drafted.append(length)
            right = min(accepted, length)
            free.update(Trial(useless if length else None, length, min(right + 1, length), right))
        return drafted

    first, second = rounds(100, 0), rounds(200, 0)
    assert 0 < sum(second) <= 25
    assert sum(first) <= 30
    assert sum(n > 0 for n in rounds(250, 16)[-50:]) == 50


@pytest.mark.parametrize("cost", [0.05, 0.2, 0.5])
def test_what_is_never_right_is_tried_for_a_small_share_of_the_time(cost: float) -> None:
    """Whatever a try costs, in passes; and one that turns good is soon found."""
    state, draft = AdaptiveLength(Costs({1: 1.0, 17: 1.0}), loss_share=1.0).start(), Prospect("d", step_seconds=cost)
    lost = 0.0
    for number in range(2000):
        length = state.plan([draft], 64, 0).limit
        state.update(Trial(draft if length else None, length, min(1, length), 0))
        lost += cost * length * (number >= 200)
    assert 0.0 < lost <= 0.016 * 1800
    for _ in range(250):
        length = state.plan([draft], 64, 0).limit
        state.update(Trial(draft if length else None, length, length, length))
    assert length > 1


def test_the_dearer_a_draft_the_sooner_it_is_given_up() -> None:
    """A pause is one over the probability that drafts which just pay are all in vain."""
    cheap, dear = Tries(), Tries()
    for rounds in range(1, 5):
        cheap.tried(("d", 0), False, 0.3)
        dear.tried(("d", 0), False, 0.6)
        for tries, missed in ((cheap, 0.7), (dear, 0.4)):
            assert tries.pause(("d", 0)) == pytest.approx(min(32.0, missed**-rounds))
    cheap.tried(("d", 0), True, 0.3)
    assert cheap.pause(("d", 0)) == 1.0


def test_a_copy_is_learned_without_being_offered() -> None:
    """Neither probes nor rounds are spent on it, and both its rates are learned apart."""
    copy = Prospect("copy", kind=1, first=0.1, later=0.1, foretold=True)
    state = AdaptiveLength(Costs({1: 1.0, 2: 1.6, 17: 10.6})).start()
    for _ in range(200):
        assert state.plan([copy], 64, 0).limit == 0
        state.update(Trial())
    for _ in range(60):
        state.learn(Finding(copy, 0, 0, accepted=True))
        state.learn(Finding(copy, 0, 1, accepted=True))
        state.learn(Finding(copy, 0, 1, accepted=False, again=True))
    assert state.plan([copy], 64, 0).limit >= 4
    for _ in range(60):
        state.learn(Finding(copy, 0, 1, accepted=False))
    assert state.plan([copy], 64, 0).limit == 1
    state.update(Trial(copy, drafted=1, tested=1, accepted=0))  # what is offered is not counted twice
    assert state.plan([copy], 64, 0).limit == 1


def test_a_debt_is_paid_on_paper_and_each_time_it_takes_twice_as_much() -> None:
    account = Account(probe_share=0.02, loss_passes=1.0, loss_share=0.0)
    for needed in (1.0, 2.0, 4.0):
        assert not account.suspended(1.0, risk=0.5)
        assert account.bearable(1.0) == 1.0
        account.spend(3.0, saved=-0.6)
        assert account.suspended(1.0, risk=0.5)
        for _ in range(4):
            account.save_on_paper(needed / 4 - 0.01)
            assert account.suspended(1.0, risk=0.5)
        account.save_on_paper(0.05)
    assert not account.suspended(1.0, risk=0.5)
    account.spend(3.0, saved=1.9)  # all that was lost is made good, in earnest
    account.spend(3.0, saved=-2.5)
    assert account.suspended(1.0, risk=0.5)
    account.save_on_paper(-9.0)
    account.save_on_paper(1.01)
    assert not account.suspended(1.0, risk=0.5)


def test_time_alone_allows_a_little_more_loss_and_pardons_nothing() -> None:
    """Drafts that always lose, by whatever is allowed, and never win on paper: a pass and one per cent in all."""
    account, passes = Account(probe_share=0.0, loss_passes=1.0, loss_share=0.01), 0
    lost = 0.0
    while passes < 3000:
        if account.suspended(1.0, risk=0.6):
            account.spend(1.0)
        else:
            account.spend(1.6, saved=-0.6)
            lost += 0.6
        passes += 1
        assert lost <= 1.0 + 0.01 * (passes + lost)
    assert lost > 20.0  # what is allowed is used


def test_suspended_copies_are_judged_by_what_they_would_have_saved() -> None:
    copy = Prospect("copy", first=0.95, later=0.95, foretold=True)
    state = AdaptiveLength(Costs({1: 1.0, 2: 1.6, 17: 10.6}), loss_share=0.0).start()
    while (planned := state.plan([copy], 64, 10).limit) > 0:
        state.update(Trial(copy, drafted=planned, tested=1, accepted=0))
    for start in range(20, 40):
        if state.plan([copy], 64, start).limit:
            break
        for place in range(8):
            state.learn(Finding(copy, start, place, accepted=True))
    assert 20 < start <= 30


def test_in_padded_batches_a_row_that_seldom_drafts_pays_for_its_company() -> None:
    """Widening costs 0.3 passes and gains 0.9 tokens: worth it alone and where all eight draft, not for one of eight."""
    costs = {1: 1.0, 2: 1.3}
    sure = Prospect("copy", first=0.9, later=0.9, longest=1)
    nothing = Prospect("copy", longest=0)
    seldom, always, alone = (AdaptiveLength(Costs(costs, company=company), longest=1).start() for company in (8, 8, 1))
    for _ in range(200):
        seldom.plan([nothing], 64, 0)
        always.plan([sure], 64, 0)
        alone.plan([nothing], 64, 0)
    assert [state.plan([sure], 64, 0).limit for state in (seldom, always, alone)] == [0, 1, 1]


def test_the_company_of_a_table_outlives_json() -> None:
    for company in (1, 4):
        costs = Costs({1: 1.0, 2: 1.5}, company=company)
        assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@given(st.integers(0, 10**6), st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
def test_signals_are_the_same_on_host_and_device(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(6, 40, generator=generator) * 4).to(dtype)
    logits[0, 5:] = -torch.inf
    tokens = logits.argmax(-1)
    tokens[1] = 7
    device = token_signals(logits, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.device_data.ROW_BY_ROW_FROM", 0)
        assert token_signals(logits, tokens) == device


def test_a_drafts_law_that_is_none_has_some_signal() -> None:
    for odd in (torch.full((1, 2000), -torch.inf), torch.full((1, 2000), torch.nan)):
        assert 0 <= token_signals(odd, torch.tensor([3]))[0] <= len(EDGES)
