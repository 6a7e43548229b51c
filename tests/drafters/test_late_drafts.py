"""Drafts that begin while rows are under way, beside others that go on; and what they have to read then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.costs import Costs, DraftSeconds, SharedCosts
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength, LengthState, Prospect
from outrider.draft_length.base import SimplePlan
from outrider.drafters import ChoiceDrafter, ModelDrafter, NgramDrafter, SpeculativeDrafter, SuffixDrafter
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.model import USUAL, seconds_after
from outrider.drafters.ready import begin_rest, state_with, worth_while
from outrider.errors import ParameterError
from outrider.models.table import TableSequence
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.request.choices import make_length
from outrider.sampling import SamplingSettings
from tests.helpers.marks import thinned
from tests.helpers.ngrams import trained
from tests.helpers.planned import DEAR, FLAT, one_row_left
from tests.helpers.samples import V
from tests.helpers.tiny_models import module, tiny_encoder_decoder
from tests.helpers.toys import PROMPT, SETTINGS, table


def requests(*new: int) -> list[Request]:
    return [Request(PROMPT, count, RandomStream(0, row)) for row, count in enumerate(new)]


class Counted(SuffixDrafter):
    """Notes for which rows it began and ended."""

    def __init__(self, name: str, fails: bool = False) -> None:
        super().__init__()
        self.name, self.fails = name, fails
        self.begun: list[int] = []
        self.ended: list[int] = []

    def begin(self, rows: Sequence[DraftRow], context: DraftContext) -> None:
        self.begun += [id(row.tokens) for row in rows]
        if self.fails:
            raise ArithmeticError
        super().begin(rows, context)

    def end(self, row: DraftRow) -> None:
        self.ended.append(id(row.tokens))
        super().end(row)


def test_what_is_ready_goes_on_and_the_rest_begins() -> None:
    context = DraftContext(SamplingSettings(), table(1, V), V)
    rows = [DraftRow([0, 1, 2], 3, RandomStream(0, i), TableSequence()) for i in range(2)]
    one, two, three = Counted("one"), Counted("two"), Counted("three")
    both, whole = ChoiceDrafter([one, three]), ChoiceDrafter([one, two, three])
    one.begin(rows, context)
    states = [row.state for row in rows]
    for before, after in ((one, both), (both, whole)):
        for row in rows:
            row.state = state_with(after, before, row)
        begin_rest(after, before, rows, context)
    assert [row.state.rows[0].state for row in rows] == states
    for row in rows:
        whole.end(row)
    for part in (one, two, three):
        assert part.begun == part.ended == [id(row.tokens) for row in rows]


def test_a_part_that_is_ready_stays_so() -> None:
    quick, slow = ModelDrafter(table(3, V), step_seconds=0.0), ModelDrafter(table(2, V), step_seconds=9.0)
    slow.name = "slow"
    policy = AdaptiveLength(Costs({1: 1.0, 17: 2.0}, rows=4))
    both, how = ChoiceDrafter([quick, slow]), SETTINGS["greedy"]
    assert worth_while(both, policy, how) is quick
    assert worth_while(both, policy, how, quick) is quick
    assert worth_while(both, policy, how, slow) is both
    assert worth_while(both, policy, how, both) is both


def test_choices_among_choices_are_one() -> None:
    one, two, three = (Counted(name) for name in ("one", "two", "three"))
    whole = ChoiceDrafter([ChoiceDrafter([one, two]), three])
    assert whole.drafters == [one, two, three]
    with pytest.raises(ParameterError, match="one, two, one"):
        ChoiceDrafter([ChoiceDrafter([one, two]), Counted("one")])


class Whole(ChoiceDrafter):
    """One's own, of which nobody takes a part."""


def test_a_choice_of_ones_own_goes_on_as_a_whole() -> None:
    one, two, three = Counted("one"), Counted("two"), Counted("three")
    own = Whole([one, two])
    both = ChoiceDrafter([own, three])
    assert both.drafters == [own, three]
    context = DraftContext(SamplingSettings(), table(1, V), V)
    row = DraftRow([0, 1, 2], 3, RandomStream(0), TableSequence())
    own.begin([row], context)
    row.state = state_with(both, own, row)
    begin_rest(both, own, [row], context)
    both.end(row)
    assert [part.begun for part in (one, two, three)] == [part.ended for part in (one, two, three)] == [[id(row.tokens)]] * 3


@pytest.mark.parametrize("setting", ["greedy", "temperature 1"])
def test_who_joins_many_begins_with_what_is_worth_it_for_so_many(setting: str) -> None:
    """A row that was alone goes on with all that it has, beside one that has less; which gets the rest once it is alone."""
    copies, model = Counted("copies"), ModelDrafter(table(2, V), step_seconds=0.01)

    def shared(rows: int) -> SharedCosts:
        return SharedCosts(Costs({1: 1.0, 17: 1.2}, rows=rows), {model.name: 0.1 if rows == 1 else 500.0})

    both = ChoiceDrafter([copies, model])
    length = AdaptiveLength(FLAT, by_rows=shared).together(2)
    decoder = Decoder(table(1, V), [], SETTINGS[setting], both, length)
    first, second = requests(60, 90)
    records: dict[int, list[Any]] = {0: [], 1: []}
    (one,) = decoder.admit([first])
    assert one.drafter is both
    together = 0
    for step in range(200):
        if step == 3:
            (other,) = decoder.admit([second])
            assert (one.drafter, other.drafter) == (both, copies)
        made = dict(decoder.step())
        for number, record in made.items():
            records[number].append(record)
        together += len(made) == 2 and all(record.drafted > 0 for record in made.values())
    assert together > 1
    assert other.drafter is both
    assert {record.drafter for record in records[1] if record.drafted} == {"copies", model.name}
    assert len(copies.begun) == len(copies.ended) == 2
    assert [len(row.tokens) for row in (one, other)] == [len(PROMPT) + 60, len(PROMPT) + 90]
    if setting == "greedy":
        plain = decode(table(1, V), [first, second], SETTINGS[setting])[0]
        assert [row.tokens[len(PROMPT) :] for row in (one, other)] == plain


class Sampled(SuffixDrafter):
    """Dear where it samples, as n-grams are."""

    def seconds_for(self, sampling: SamplingSettings) -> DraftSeconds:
        return DraftSeconds(0.0 if sampling.greedy else 9.0)


def test_what_is_made_ready_follows_how_it_is_sampled(tmp_path: Path) -> None:
    policy, drafter = AdaptiveLength(Costs({1: 1.0, 17: 2.0}, rows=4)), Sampled()
    assert worth_while(drafter, policy, SETTINGS["greedy"]) is drafter
    assert worth_while(drafter, policy, SETTINGS["temperature 1"]) is None
    grams = NgramDrafter(trained(tmp_path / "table", [[0, 1, 2, 0, 1, 2]], V))
    grams.begin([], DraftContext(SETTINGS["temperature 1"], table(1, V), V))
    quick = grams.seconds_for(SETTINGS["greedy"])
    grams.begin([], DraftContext(SETTINGS["greedy"], table(1, V), V))
    assert quick == grams.seconds_for(SETTINGS["greedy"]) == grams.seconds
    assert grams.seconds_for(SETTINGS["temperature 1"]).token > quick.token


def test_a_source_that_no_late_draft_could_read_is_refused_at_once() -> None:
    class Deaf(Counted):
        def check_source(self, source: Any) -> None:
            raise ParameterError(f"source of {len(source)} tokens")

    target = tiny_encoder_decoder("Bart")
    request = Request([2, 1], 4, RandomStream(0), source=[3, 4, 5])
    decoder = Decoder(target, (), SETTINGS["greedy"], Deaf("deaf"), AdaptiveLength(DEAR))
    with pytest.raises(ParameterError, match="source of 3 tokens"):
        decoder.check(request)


def test_all_is_freed_where_a_draft_can_not_begin() -> None:
    target = table(1, V)
    good, bad = Counted("good"), Counted("bad", fails=True)
    decoder = Decoder(target, requests(2, 30), SETTINGS["greedy"], ChoiceDrafter([good, bad]), one_row_left().together(2))
    with pytest.raises(ArithmeticError):
        list(decoder.rounds())
    assert good.begun == good.ended
    assert bad.begun == bad.ended
    assert len(good.begun) == 1
    assert all(row.sequence.length == 0 for row in decoder.rows)


def test_all_is_freed_where_some_rows_have_changed_their_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between the rows that go on from one drafter to two."""
    one, two = Counted("one"), Counted("two")
    asked: list[DraftRow] = []

    def interrupted(drafter: Drafter, before: Drafter | None, row: DraftRow) -> Any:
        asked.append(row)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return state_with(drafter, before, row)

    def shared(rows: int) -> SharedCosts:
        return SharedCosts(FLAT if rows == 2 else Costs({1: 1.0, 17: 17.0}, rows=4), {"one": 0.0})

    monkeypatch.setattr("outrider.decode.loop.state_with", interrupted)
    one.remembers = True  # so that it is ready from the beginning
    length = AdaptiveLength(DEAR, by_rows=shared).together(3)
    decoder = Decoder(table(1, V), requests(2, 30, 30), SETTINGS["greedy"], ChoiceDrafter([one, two]), length)
    with pytest.raises(KeyboardInterrupt):
        list(decoder.rounds())
    assert sorted(one.begun) == sorted(one.ended)
    assert len(one.begun) == 3
    assert two.begun == []
    assert all(row.sequence.length == 0 for row in decoder.rows)


class Measuring(SuffixDrafter):
    """Counts how often it was asked what it costs."""

    asked = 0

    def measure(self) -> None:
        self.asked += 1


def test_nothing_is_measured_once_rows_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may draft with the same one, by what it has said."""
    monkeypatch.setattr("outrider.costs.book.held_or_measured", lambda model, rows=1: Costs({1: 1.0, 17: 2.0}))
    target, drafter = table(1, V), Measuring()
    length = make_length(None, target, drafter, 3)
    asked = drafter.asked
    assert asked > 0
    decode(target, requests(2, 9, 30), SETTINGS["greedy"], drafter, length.together(3))
    assert drafter.asked == asked


def test_what_a_draft_is_behind_is_told_apart() -> None:
    costs = Costs({1: 1.0, 2: 1.1, 33: 4.2}, warm=0.25)
    assert seconds_after(None, 9, 9) == (0.0, 0.0, 0.0)
    assert seconds_after(costs, 1, 9) == pytest.approx((0.75, 0.25, 0.0))
    step, start, behind = seconds_after(costs, USUAL, 9)
    assert step + start == pytest.approx(costs.verify(USUAL))
    assert behind == 0.0
    assert seconds_after(costs, 300, 400) == pytest.approx((step, start, costs.verify(300) - costs.verify(USUAL)))


class _Later(DraftLength, LengthState):
    """Four tokens from a number of tokens on, none before."""

    def __init__(self, begin: int) -> None:
        self._begin = begin

    def start(self) -> LengthState:
        return self

    def plan(self, prospects: Sequence[Prospect], room: int, context: int) -> SimplePlan:
        del prospects
        return SimplePlan(0, min(room, 4) if context >= self._begin else 0)


class _Blind(_Later):
    """One that looks at nothing."""

    def __init__(self, prospect: int, limit: int) -> None:
        self._plan = SimplePlan(prospect, limit)

    def plan(self, prospects: Sequence[Prospect], room: int, context: int) -> SimplePlan:
        del prospects, room, context
        return self._plan


@pytest.mark.parametrize(("prospect", "limit"), [(0, 8), (0, -1), (1, 2), (-1, 2)])
def test_a_plan_for_which_there_is_no_room_is_refused(prospect: int, limit: int) -> None:
    model, request = TransformersModel(module("Llama")), Request([1, 2, 3], 5, RandomStream(5, 0))
    said = rf"plan 0 to 4 tokens.* of prospects 0 to 0: _Blind plans {limit} of prospect {prospect}; keep to `room`"
    with pytest.raises(ParameterError, match=said):
        decode(model, [request], SETTINGS["greedy"], SuffixDrafter(), _Blind(prospect, limit))


@pytest.mark.parametrize(("begin", "inside"), thinned([0, 20, 30, 60], [False, True]))
def test_a_draft_that_has_fallen_behind_has_read_all_of_the_text(begin: int, inside: bool) -> None:
    """The target's own law, drafted by another engine: every token is accepted, if it was drafted after the same tokens."""
    target, draft = (TransformersModel(module("Llama")) for _ in range(2))
    sampled, many = SETTINGS["temperature 1"], [Request([1, 2, 3], 80, RandomStream(5, row)) for row in range(3)]
    drafter = SpeculativeDrafter(draft, SuffixDrafter(), FixedLength(2)) if inside else ModelDrafter(draft, step_seconds=0.0)
    _, rounds = decode(target, many, sampled, drafter, _Later(begin))
    for row in rounds:
        assert all(record.accepted == record.drafted for record in row)
        assert sum(record.drafted for record in row) > (80 - begin) / 2
