"""Which alternatives are scored: those that pay, by what is learned of them, and no more than drafts may lose."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from outrider.costs import Costs, DraftSeconds
from outrider.draft_length import AdaptiveLength
from outrider.draft_length.base import Prospect, Trial
from outrider.draft_length.predicted import oracle_seconds, predicted_seconds
from outrider.draft_steps.signals import LEAST_LIKELY, likely_class, shares_of
from outrider.records import Round


def test_the_likeliest_other_tokens_are_found() -> None:
    law = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01]).log()
    (shares,) = shares_of(law.unsqueeze(0))
    assert [token for token, _ in shares.others(0)] == [1, 2, 3, 4]
    assert [token for token, _ in shares.others(2)] == [0, 1, 3, 4]
    assert [token for token, _ in shares.others(2, 2)] == [0, 1]
    assert shares.others(2, 1)[0][1] == pytest.approx(0.5)
    assert [token for token, _ in shares.others(5, 9)] == [0, 1, 2, 3, 4]
    (nothing,) = shares_of(torch.full((1, 4), -torch.inf))
    assert nothing.others(0) == []
    (certain,) = shares_of(torch.tensor([[0.0, -torch.inf]]))
    assert certain.others(0, 3) == []
    assert [likely_class(p) for p in (LEAST_LIKELY, 0.05, 0.1, 0.2, 0.3, 0.9)] == [0, 1, 2, 3, 4, 5]


def chosen(costs: Costs, others: Sequence[Sequence[float]], signals: Sequence[int]) -> list[list[int]]:
    """What an adaptive length that knows nothing yet would have scored."""
    state = AdaptiveLength(costs).start()
    plan = state.plan([Prospect("d", step_seconds=0.05, gated=True, first=0.6, later=0.6)], 30, 10)
    assert plan.gated
    return plan.choose(signals, others)


def test_alternatives_fill_what_is_free_and_stop_where_they_cost_more_than_they_bring() -> None:
    others = [[0.3, 0.1, 0.05], [0.3, 0.03]]
    free = Costs({1: 1.0, 17: 1.0})
    assert chosen(free, others, [5, 5]) == [[0, 1, 2], [0, 1]]
    dear = Costs({n: float(n) if n > 1 else 1.0 for n in range(1, 18)} | {2: 1.01, 3: 1.02})
    assert chosen(dear, others, [5, 5]) == [[], []]
    some = Costs({n: 1.0 + 0.1 * (n - 1) for n in range(1, 18)})
    assert chosen(some, others, [5, 5]) == [[0], [0]]
    assert chosen(some, others, [0, 0]) == [[0], []]  # the second place is seldom reached


def test_alternatives_that_are_never_right_are_given_up() -> None:
    costs = Costs({n: 1.0 + 0.03 * (n - 1) for n in range(1, 18)})
    state = AdaptiveLength(costs).start()
    about = Prospect("d", step_seconds=0.05, gated=True, first=0.6, later=0.6)
    counts = []
    for _ in range(60):
        plan = state.plan([about], 30, 10)
        if not plan.gated:
            continue
        (places,) = plan.choose([3], [[0.12, 0.1]])
        counts.append(len(places))
        others = [(likely_class(0.1), False)] * len(places)
        state.update(Trial(about, 1, 1, 1, (3,), others, len(places)))
    assert counts[0] == 2
    assert counts[-1] == 0


def test_a_plan_never_has_more_scored_than_cost_tables_know() -> None:
    state = AdaptiveLength(Costs({1: 1.0, 17: 1.0, 64: 1.0}), longest=40).start()
    about = Prospect("d", step_seconds=1e-4, gated=True, first=0.99, later=0.99)
    plan = state.plan([about], 40, 10)
    for drafted in (3, 15, 16, 17, 25):
        count = sum(map(len, plan.choose([7] * drafted, [[0.3, 0.2, 0.1]] * drafted)))
        assert count == (min(3 * drafted, 16 - drafted) if drafted < 16 else 0)


def test_alternatives_lose_no_more_than_drafts_may() -> None:
    """Every draft is rejected, and what was hoped for beside it never comes."""
    costs = Costs({n: 1.0 + 0.1 * (n - 1) for n in range(1, 18)})
    policy = AdaptiveLength(costs)
    state = policy.start()
    about = Prospect("d", step_seconds=0.02, gated=True, first=0.6, later=0.6)
    lost, passes = 0.0, 0
    for _ in range(300):
        plan = state.plan([about], 30, 10)
        drafted = min(1, plan.limit)
        count = sum(map(len, plan.choose([3] * drafted, [[0.9] * 8] * drafted))) if plan.gated else 0
        lost += costs.verify(1 + drafted + count) - costs.verify(1) + 0.02 * drafted
        passes += 1
        learned = [(likely_class(0.9), False)] * 8 if plan.gated else []
        signals = (3,) * drafted if plan.gated else ()
        state.update(Trial(about if drafted else None, drafted, drafted, 0, signals, learned, count))
    assert lost < policy.loss_passes + (policy.loss_share + policy.probe_share) * passes


def test_what_comes_is_learned_from_candidates_that_were_not_scored() -> None:
    """A class that was given up comes back once it pays."""
    costs = Costs({n: 1.0 + 0.06 * (n - 1) for n in range(1, 18)})
    state = AdaptiveLength(costs).start()
    about = Prospect("d", step_seconds=0.02, gated=True, first=0.6, later=0.6)
    counts: list[int] = []

    def rounds(right: bool) -> None:
        for i in range(60):
            plan = state.plan([about], 30, 10)
            if plan.gated:
                (places,) = plan.choose([3], [[0.2]])
                counts.append(len(places))
                accepted = i % 2
                came = right and not accepted
                taken = came and bool(places)
                state.update(Trial(about, 1, 1, accepted, (3,), [(likely_class(0.2), came)], len(places), taken))
            else:
                state.update(Trial())

    rounds(False)
    assert counts[-1] == 0
    rounds(True)
    assert counts[-1] == 1


def test_an_oracle_counts_the_tokens_of_alternatives() -> None:
    costs = Costs({1: 1.0, 2: 1.9, 17: 1.95})
    rounds = [Round((1, 2), 1, 0, "d", seconds={}, alternatives=2, taken=True)] * 10
    assert oracle_seconds(rounds, costs, DraftSeconds(), 5) == pytest.approx(19.0)
    assert predicted_seconds(rounds[:1], costs, {}, 5) == pytest.approx(costs.verify(4))
