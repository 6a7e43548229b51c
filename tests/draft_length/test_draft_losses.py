"""What drafts that do not pay may cost: tries, debts, deterministic tokens, copies judged on paper."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from outrider.costs import Costs
from outrider.draft_length import AdaptiveLength, Prospect, Trial
from outrider.draft_length.account import Account
from outrider.draft_length.base import Finding
from outrider.draft_length.previews import Previews
from outrider.draft_length.tries import Tries
from tests.helpers.planned import FLAT, LINEAR


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


def test_previewed_tokens_are_compared_with_what_came() -> None:
    previews, copy = Previews(), Prospect("copy", kind=2, deterministic=True)
    previews.add(copy, [7, 8, 9], start=3)
    assert previews.compare([0, 0, 0]) == []
    assert previews.compare([0, 0, 0, 7]) == [Finding(copy, 3, 0, True)]
    previews.add(copy, [8, 1, 9], start=4)
    found = previews.compare([0, 0, 0, 7, 8, 1])
    first = [Finding(copy, 3, 1, True), Finding(copy, 3, 2, False)]
    assert found == [*first, Finding(copy, 4, 0, True), Finding(copy, 4, 1, True, again=True)]
    previews.add(copy, [5], start=6)  # nothing that counts in full is followed any more
    assert previews.compare([0, 0, 0, 7, 8, 1, 5, 5]) == [Finding(copy, 4, 2, False, again=True), Finding(copy, 6, 0, True)]
    assert previews.compare([0, 0, 0, 7, 8, 1, 5, 5, 5]) == []


def test_previewed_tokens_are_read_no_further_than_they_turn_out_right() -> None:
    """An n-gram's guesses are looked up one by one: most are never asked for."""
    read: list[int] = []

    def guesses() -> Iterator[int]:
        for token in (7, 8, 9):
            read.append(token)
            yield token

    previews, guess = Previews(), Prospect("guess", deterministic=True)
    previews.add(guess, guesses(), start=3)
    previews.compare([0, 0, 0])
    assert read == [7]
    assert previews.compare([0, 0, 0, 7]) == [Finding(guess, 3, 0, True)]
    assert read == [7, 8]
    assert previews.compare([0, 0, 0, 7, 1, 9]) == [Finding(guess, 3, 1, False)]
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
    copy = Prospect("copy", kind=1, first=0.1, later=0.1, deterministic=True)
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
    copy = Prospect("copy", first=0.95, later=0.95, deterministic=True)
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


def test_a_row_that_has_just_joined_a_batch_does_not_widen_the_passes_of_all() -> None:
    """Of a good copy alone, of one in a batch whose rows seldom have any, and of a probe that all the others wait for."""
    costs = {1: 1.0, 2: 1.3, 3: 1.6, 5: 2.2, 9: 3.4}
    copy = Prospect("copies", first=0.9, later=0.9, longest=8, deterministic=True)
    model = Prospect("model", first=0.3, later=0.3, longest=8)
    for company, drafts in ((1, True), (64, False)):
        state = AdaptiveLength(Costs(costs, company=company)).start()
        assert (state.plan([copy], 100, 10).limit > 0) is drafts
    probed = {}
    for company in (1, 64):
        state = AdaptiveLength(Costs(costs, company=company)).start()
        probed[company] = 0
        for _ in range(60):
            plan = state.plan([model], 100, 10)
            probed[company] += plan.limit > 0
            state.update(Trial(model if plan.limit else None, plan.limit, min(plan.limit, 1), 0))
    assert probed[1] >= 2
    assert probed[64] == 0


def test_the_company_of_a_table_outlives_json() -> None:
    for company in (1, 4):
        costs = Costs({1: 1.0, 2: 1.5}, company=company)
        assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
