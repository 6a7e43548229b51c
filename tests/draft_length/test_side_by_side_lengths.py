"""Draft lengths of rows side by side: when none is worth while, what rows learn from each other, tables of lists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import outrider
from outrider.costs import Costs, DraftSeconds, costs_by, costs_of_a_list, kept, measured_costs
from outrider.costs.book import CostBook
from outrider.costs.measure import LIST_ROWS, batch_sizes
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength, Prospect, Trial
from outrider.draft_length.base import LengthState
from outrider.drafters import ChoiceDrafter, ModelDrafter, PromptLookupDrafter, SuffixDrafter
from outrider.drafters.ready import worth_while
from outrider.generation import Generation
from outrider.models.base import LanguageModel
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.request.choices import make_length
from outrider.sampling import SamplingSettings
from tests.helpers.enumerate import target_joint
from tests.helpers.planned import FLAT, LINEAR
from tests.helpers.samples import ALARM, SAMPLES, V, p_value, p_value_of, run
from tests.helpers.toys import PROMPT, SETTINGS, law_of, table

QUICK = Costs({1: 1.0, 17: 2.0})


def of_rows(seconds: dict[int, float], rows: int = 8) -> AdaptiveLength:
    return AdaptiveLength(Costs(seconds, rows=rows))


@pytest.mark.parametrize(
    ("policy", "never"),
    [
        (of_rows({1: 1.0, 17: 17.0}), True),
        (of_rows({1: 1.0, 2: 1.8, 17: 13.8}), True),  # at four right of five, as many tokens a second
        (of_rows({1: 1.0, 2: 1.5, 17: 9.0}), False),
        (of_rows({1: 1.0, 17: 1.0}), False),
        (AdaptiveLength(LINEAR), False),  # one row alone finds out for itself
        (AdaptiveLength(Costs({1: 1.0, 17: 17.0}, rows=8), only=3), False),  # the user's choice
    ],
)
def test_drafts_are_not_looked_for_where_good_ones_would_gain_nothing(policy: AdaptiveLength, never: bool) -> None:
    assert policy.never("a", DraftSeconds()) == never
    assert policy.together(8).never("a", DraftSeconds()) == never
    assert not FixedLength(3).never("a", DraftSeconds())
    drafter = ModelDrafter(table(2, V), step_seconds=0.0)
    decoder = Decoder(table(1, V), [], SETTINGS["temperature 1"], drafter, policy)
    (row,) = decoder.admit([Request(PROMPT, 8, RandomStream(0))])
    assert row.drafter is (None if never else drafter)
    decoder.close()


def test_of_several_drafters_those_are_made_ready_that_may_be_worth_it() -> None:
    policy = of_rows({1: 1.0, 2: 1.5, 17: 9.0})
    slow, quick = ModelDrafter(table(2, V), step_seconds=0.4), ModelDrafter(table(3, V), step_seconds=0.02)
    copies = PromptLookupDrafter()
    for given, left in (
        ([slow, copies], copies),
        ([quick, copies], None),
        ([slow, SuffixDrafter(memory=True)], "suffix"),
        ([slow, quick, copies], f"{quick.name} + {copies.name}"),
    ):
        both = ChoiceDrafter(given)
        found = worth_while(both, policy, SamplingSettings())
        assert found is not None
        assert found is (both if left is None else found)
        assert left in (None, found, found.name)
    assert worth_while(slow, policy, SamplingSettings()) is None


def test_a_drafter_that_remembers_is_shown_every_text() -> None:
    drafter = SuffixDrafter(memory=True)
    request = Request(PROMPT, 8, RandomStream(0))
    policy = of_rows({1: 1.0, 17: 17.0})
    (row,) = Decoder(table(1, V), [], SETTINGS["temperature 1"], drafter, policy).admit([request])
    assert row.drafter is drafter


def tried(states: list[LengthState], prospect: Prospect, rounds: int) -> int:
    """Drafts of rows in turn, none of which is right."""
    count = 0
    for _ in range(rounds):
        for state in states:
            drafted = state.plan([prospect], 64, 0).limit
            count += drafted > 0
            state.update(Trial(prospect if drafted else None, drafted, min(1, drafted), 0, ()))
    return count


def test_rows_learn_from_each_other_that_a_draft_is_useless() -> None:
    about, rows = Prospect("a", first=0.9, later=0.9, step_seconds=0.1), 20
    policy = AdaptiveLength(QUICK)
    apart = tried([policy.start() for _ in range(rows)], about, 30)
    together = policy.together(rows)
    side_by_side = tried([together.start() for _ in range(rows)], about, 30)
    assert side_by_side < apart / 3
    assert side_by_side > 0
    assert tried([together.start()], about, 5) <= 1  # a row that joins later knows it from the beginning


def test_rows_learn_from_each_other_that_a_draft_is_right() -> None:
    about = Prospect("a", first=0.2, later=0.2)
    together = AdaptiveLength(FLAT).together(4)
    states = [together.start() for _ in range(4)]
    for _ in range(60):
        for state in states[:3]:
            state.update(Trial(about, 3, 3, 3, (0, 0, 0)))
    assert states[3].plan([about], 64, 0).limit >= 8


@pytest.mark.parametrize("setting", ["temperature 1", "top-p"])
def test_rows_that_learn_from_each_other_keep_the_law(setting: str) -> None:
    target, settings = table(1, V), SETTINGS[setting]
    drafter = ModelDrafter(table(2, V), step_seconds=0.1)
    tokens, rounds = run(target, drafter, settings, AdaptiveLength(QUICK).together(SAMPLES))
    assert len({record.drafted for record in rounds}) > 1
    assert p_value(tokens, target, settings) > ALARM


@pytest.mark.slow
def test_rows_that_learn_from_each_other_are_independent() -> None:
    """The joint law of two tokens of one row and two of another, whose draft lengths follow from each other's."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    drafter, pairs = ModelDrafter(table(2, V), step_seconds=0.1), []
    for i in range(1500):
        requests = [Request(PROMPT, 2, RandomStream(i, row)) for row in range(2)]
        length = AdaptiveLength(QUICK, memory=2.0).together(1)
        first, second = decode(target, requests, settings, drafter, length)[0]
        pairs.append([*first, *second])
    alone = target_joint(law_of(target, settings), V, 2)
    assert p_value_of(pairs, torch.tensordot(alone, alone, dims=0)) > ALARM


class Flat(TableModel):
    """Rows of their own length, at no further cost."""

    flat = True


def test_few_tables_serve_lists_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def held(model: LanguageModel, rows: int = 1) -> Costs:
        asked.append(rows)
        return Costs({1: 1.0 + rows, 2: 1.0 + 2 * rows, 4: 1.0 + 4 * rows}, {1: 0.5 * rows}, context=64)

    monkeypatch.setattr("outrider.costs.book.held_or_measured", held)
    for rows, company, kind in ((2, 2, TableModel), (5, 5, TableModel), (64, 1, Flat)):
        with costs_of_a_list(rows):
            costs = measured_costs(kind(torch.full((3, 3), 1 / 3)))
        assert (costs.rows, costs.company) == (rows, company)
        assert [costs.verify(n) for n in (1, 2, 4)] == pytest.approx([1.0 + n * rows for n in (1, 2, 4)])
        assert costs.verify(1, 74) == pytest.approx(1.0 + rows + 10 * 0.5 * rows)
        assert Costs.from_dict(costs.to_dict()) == costs
    assert asked == [2, 8, LIST_ROWS[-1]]
    asked.clear()
    with costs_by(CostBook(5)), costs_of_a_list(9):  # of a run, which has its own
        assert measured_costs(TableModel(torch.full((3, 3), 1 / 3))).rows == 5
    with costs_of_a_list(1):
        measured_costs(TableModel(torch.full((3, 3), 1 / 3)))
    assert asked == [5, 1]


def test_a_lists_policy_follows_passes_of_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def settled(model: LanguageModel, rows: int, attempts: int = 3) -> tuple[Costs, int, bool]:
        measured.append(rows)
        return Costs({1: 1.0, 2: 1.0 if rows == 1 else 1.9, 17: 1.0 if rows == 1 else 14.0}), 1, True

    monkeypatch.setattr(kept, "measure_settled", settled)
    target, drafter = table(1, V), PromptLookupDrafter()
    alone, listed = (make_length(None, target, drafter, rows) for rows in (1, 12))
    assert measured == [1, 16]
    assert not alone.never("a", DraftSeconds())
    assert listed.never("a", DraftSeconds())
    measured.clear()
    fixed: DraftLength = make_length(3, target, drafter, 12)  # nothing follows from what passes cost
    assert isinstance(fixed, FixedLength)
    assert not measured


def test_passes_of_many_rows_are_timed_as_far_as_they_are_small() -> None:
    assert batch_sizes(2) == batch_sizes(4) == (1, 2, 4, 8, 16)
    assert batch_sizes(8) == (1, 2, 4, 8)
    assert batch_sizes(64) == (1, 2, 4)


def test_rows_of_one_seed_learn_apart(target_folder: Path) -> None:
    """They may draw by the same numbers, and what one has drawn must not decide what the other does with them."""
    target = outrider.load(target_folder)
    for seeds, together in (([3, 4], True), ([3, 3], False)):
        made = Generation(target, ["a b", "c d"], seed=seeds, draft="prompt-lookup", temperature=1.0)
        assert isinstance(made._decoder._length, AdaptiveLength) != together
