"""When rows of a list end: what fewer rows cost, drafts that are worth it only then, and those that have fallen behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.costs import Costs, DraftSeconds, SharedCosts, costs_by, measured_costs
from outrider.costs.book import CostBook
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, Prospect
from outrider.drafters import ChoiceDrafter, ModelDrafter, PromptLookupDrafter
from outrider.models.base import LanguageModel
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.request.choices import make_length
from tests.helpers.enumerate import target_joint
from tests.helpers.planned import FLAT, one_row_left, plan_of
from tests.helpers.samples import ALARM, V, p_value_of
from tests.helpers.toys import PROMPT, SETTINGS, law_of, table


class _Model(TableModel):
    flat = True


class _Head(_Model):
    """Passes come after another's, as those of a head do."""

    @property
    def leader(self) -> LanguageModel:
        return self


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> CostBook:
    """Of a list of 8 rows."""

    def held(model: LanguageModel, rows: int = 1) -> Costs:
        del model
        if rows == 1:
            return Costs({1: 1.0, 2: 1.2, 17: 4.2}, {1: 0.1, 17: 0.2}, warm=0.5)
        return Costs({1: 9.0, 2: 16.0, 4: 30.0}, warm=4.0)

    monkeypatch.setattr("outrider.costs.book.held_or_measured", held)
    return CostBook.of_a_list(8)


def test_few_tokens_in_several_rows_cost_what_they_do_in_one(book: CostBook) -> None:
    model = _Model(torch.full((3, 3), 1 / 3))
    four, one = (book.of_fewer(rows).of(model) for rows in (4, 1))
    assert (four.rows, four.company, one.rows) == (4, 1, 1)
    assert [one.verify(n) for n in (1, 2, 17)] == [1.0, 1.2, 4.2]
    assert four.verify(1) == pytest.approx(one.verify(4))
    assert four.verify(4) == pytest.approx(one.verify(16))
    assert four.verify(8) == pytest.approx(30.0)  # 32 tokens: more than was measured of one row
    assert four.verify(1, 74) == pytest.approx(one.verify(4) + 4 * 10 * 0.1)  # each row has a context of its own
    assert book.of_fewer(8) is book
    assert book.of_fewer(4).of_fewer(8).of(model) == book.of(model)


def test_a_heads_passes_change_in_even_steps(book: CostBook) -> None:
    head = _Head(torch.full((3, 3), 1 / 3))
    for rows, share in ((1, 0.0), (2, 1 / 7), (8, 1.0)):
        found = book.of_fewer(rows).of(head)
        assert [found.verify(n) for n in (1, 2)] == pytest.approx([1.0 + 8.0 * share, 1.2 + 14.8 * share])
        assert found.warm == pytest.approx(0.5 + 3.5 * share)


@pytest.mark.parametrize("kind", [_Model, _Head])
def test_tables_of_older_runs_do_not_say_of_how_many_rows_they_are(book: CostBook, kind: type[_Model]) -> None:
    model = kind(torch.full((3, 3), 1 / 3))
    older = CostBook(8, {book.name_of(model): Costs({1: 9.0, 2: 16.0})})
    assert older.of_fewer(4).of(model).rows == 4
    assert older.of_fewer(8).of(model).rows == 1


def test_passes_of_the_last_row_are_not_padded(book: CostBook) -> None:
    """They are side by side with the others' until these have ended."""
    widths: list[Any] = []

    class Padded(_Model):
        def pad_widths(self, width: Any) -> None:
            widths.append(width(3, 0))

    model = Padded(torch.full((3, 3), 1 / 3))
    with costs_by(book.of_fewer(1)):
        assert not measured_costs(model).padded
    assert widths == [3]


def test_drafters_say_again_what_they_did_before_a_list_asked_for_fewer_rows(book: CostBook) -> None:
    drafter = ModelDrafter(_Model(torch.full((3, 3), 1 / 3)))
    with costs_by(book):
        policy = make_length(None, table(1, 3), drafter, 8)
    before = drafter.seconds
    assert isinstance(policy, AdaptiveLength)
    assert policy.by_rows is not None
    few, many = policy.by_rows(1), policy.by_rows(8)
    assert drafter.seconds == before
    assert few.costs.verify(1) < many.costs.verify(1)
    assert few.drafting(drafter.name, before).of(1) == pytest.approx(1.0)
    assert many.drafting(drafter.name, before).of(1) == pytest.approx(before.of(1))
    assert few.drafting("another", before) == before


def test_a_policy_follows_what_the_rows_that_are_left_cost() -> None:
    about = Prospect("a", first=0.8, later=0.8)
    policy = one_row_left().together(4)
    state = policy.start()
    assert policy.never("a", DraftSeconds())
    assert state.plan([about], 64, 0).limit == 0
    policy.shared_by(1)
    assert not policy.never("a", DraftSeconds())
    assert state.plan([about], 64, 0).limit > 4
    policy.shared_by(4)  # others have joined
    assert state.plan([about], 64, 0).limit == 0
    AdaptiveLength(FLAT).together(2).shared_by(1)  # nothing is known


def test_and_what_drafts_take_then() -> None:
    about = Prospect("a", first=0.6, later=0.6, step_seconds=2.0)
    policy = AdaptiveLength(FLAT, by_rows=lambda rows: SharedCosts(FLAT, {"a": 0.01 if rows == 1 else 1.0})).together(2)
    state = policy.start()
    assert state.plan([about], 64, 0).limit == 0
    policy.shared_by(1)
    assert state.plan([about], 64, 0).limit > 0


def test_drafts_of_many_rows_are_charged_for_being_handled() -> None:
    """A gain of a tenth in passes of a millisecond is eaten up by 16 rows; in those of a second it is one."""
    about = Prospect("a", first=0.1, later=0.0)
    for unit, rows, drafts in ((1e-3, 1, True), (1e-3, 16, False), (1.0, 16, True)):
        costs = Costs({1: unit, 17: unit}, rows=rows)
        assert (plan_of(AdaptiveLength(costs), about)[1] > 0) == drafts


def requests(*new: int, seed: int = 0) -> list[Request]:
    return [Request(PROMPT, count, RandomStream(seed, row)) for row, count in enumerate(new)]


@pytest.mark.parametrize("several", [False, True])
def test_drafts_begin_when_few_rows_are_left(several: bool) -> None:
    target = table(1, V)
    drafter = ModelDrafter(table(2, V), step_seconds=0.0)
    whole = ChoiceDrafter([PromptLookupDrafter(), drafter]) if several else drafter
    length = one_row_left().together(3)
    decoder = Decoder(target, requests(3, 5, 40), SETTINGS["greedy"], whole, length)
    found: list[list[Round]] = [[], [], []]
    for batch in decoder.rounds():
        for number, record in batch:
            found[number].append(record)
    assert not any(record.drafted for records in (found[0], found[1], found[2][:5]) for record in records)
    assert sum(record.drafted for record in found[2][5:]) > 4
    assert [row.drafter is None for row in decoder.rows] == [True, True, False]
    plain = decode(target, requests(3, 5, 40), SETTINGS["greedy"])[0]
    assert [[token for record in records for token in record.tokens] for records in found] == plain


@pytest.mark.slow
def test_rows_that_draft_when_others_have_ended_keep_the_law() -> None:
    """The joint law of three tokens of one row, the second of which may be drafted, and the first that ends the other."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    drafter, found, drafted = ModelDrafter(table(2, V), step_seconds=0.0), [], 0
    for i in range(2000):
        (first, second), rounds = decode(target, requests(1, 3, seed=i), settings, drafter, one_row_left().together(2))
        drafted += sum(record.drafted for record in rounds[1])
        found.append([*first, *second])
    assert drafted > 1000
    law = law_of(target, settings)
    assert p_value_of(found, torch.tensordot(target_joint(law, V, 1), target_joint(law, V, 3), dims=0)) > ALARM


def test_later_drafts_pay_their_share_of_what_is_behind() -> None:
    """A draft that is read for once is not given up for what it costs the first time, unless little is left to draft for."""
    policy, about = AdaptiveLength(FLAT), Prospect("a", first=0.8, later=0.8, behind_seconds=5.0)
    assert plan_of(policy, about)[1] > 0
    assert plan_of(policy, about, room=3)[1] == 0
    assert plan_of(policy, Prospect("a", first=0.8, later=0.8, start_seconds=5.0))[1] == 0
