"""What passes cost: read off a table, measured once, kept on disk unless the machine was busy, forgotten when refuted."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import outrider
from outrider.costs import CostBook, Costs, DraftSeconds, costs_by, forget_costs, kept, measured_costs, review_costs
from outrider.costs.kept import GIVE_UP
from outrider.costs.measure import _noise, _table, measure_settled
from outrider.costs.pass_timer import PassTimer
from outrider.drafters import ModelDrafter
from outrider.drafters.base import DraftContext
from outrider.models.table import TableModel, TableSequence
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.support.clock import PhaseClock


def test_widths_are_padded_where_wider_is_quicker() -> None:
    def widths(seconds: dict[int, float], slopes: dict[int, float] | None = None, context: int = 64) -> list[int]:
        return [Costs(seconds, slopes or {}).width(n, context) for n in range(1, 9)]

    assert widths({1: 3.0, 2: 3.0, 4: 2.0, 8: 4.0}) == [4, 4, 4, 4, 5, 6, 7, 8]
    assert widths({1: 1.0, 2: 1.1, 4: 1.2}) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert widths({1: 1.0, 2: 0.99}) == [1, 2, 3, 4, 5, 6, 7, 8]
    slopes = {1: 0.0, 4: 0.01}
    assert widths({1: 3.0, 4: 2.0}, slopes)[0] == 4
    assert widths({1: 3.0, 4: 2.0}, slopes, context=300)[0] == 1  # at a long context the wider pass costs more


def test_costs_grow_with_the_context() -> None:
    costs = Costs({1: 1.0, 4: 1.0}, {1: 0.001, 4: 0.003}, context=64)
    assert costs.verify(1, 1064) == pytest.approx(2.0)
    assert costs.verify(4, 1064) == pytest.approx(4.0)
    assert costs.verify(2, 1064) == pytest.approx(1.0 + 1000 * (0.001 + 0.002 / 3))
    assert costs.verify(4, 10) == costs.verify(4) == 1.0


def test_costs_are_interpolated_between_sizes() -> None:
    costs = Costs({1: 1.0, 4: 2.5, 8: 3.5})
    assert costs.verify(2) == pytest.approx(1.5)
    assert costs.verify(6) == pytest.approx(3.0)
    assert costs.verify(12) == pytest.approx(4.5)


def test_a_batchs_table_knows_whether_rows_wait_for_the_widest() -> None:
    class Flat(TableModel):
        flat = True

    for kind, company in ((TableModel, 3), (Flat, 1)):
        with costs_by(CostBook(3)):
            assert measured_costs(kind(torch.full((3, 3), 1 / 3))).company == company
    assert measured_costs(TableModel(torch.full((3, 3), 1 / 3))).company == 1


def test_a_batchs_table_is_its_threads_own() -> None:
    model, seen = TableModel(torch.full((3, 3), 1 / 3)), []
    with costs_by(CostBook(3)):
        other = Thread(target=lambda: seen.append(measured_costs(model).company))
        other.start()
        other.join()
        assert measured_costs(model).company == 3
    assert seen == [1]


def test_costs_see_what_a_model_takes() -> None:
    slow = TableModel(torch.full((3, 3), 1 / 3), seconds_per_call=0.004, seconds_per_token=0.006)
    quick = TableModel(torch.full((3, 3), 1 / 3))
    costs = measured_costs(slow)
    assert costs.verify(8) > costs.verify(1) >= 0.01
    assert measured_costs(quick).verify(1) < costs.verify(1)


def test_a_disturbed_pass_is_no_cheap_or_dear_one() -> None:
    """One pass of one token was disturbed, and all but one of four; nothing is quicker for being wider."""
    times = {
        1: [2.0, 2.2, 2.2, 2.2, 9.0],
        2: [1.8, 2.1, 2.1, 2.1, 2.1],
        4: [2.1, 6.0, 6.0, 6.0, 7.0],
        8: [4.0, 4.4, 4.4, 4.4, 4.4],
    }
    noise = _noise(times)
    assert noise == pytest.approx((1.1 + 2.1 / 1.8) / 2)
    found = _table(times, noise, monotone=True)
    assert found[1] == found[2] == pytest.approx(1.9 * noise, rel=1e-2)
    assert found[4] == pytest.approx(2.1 * noise, rel=1e-2)
    raw = _table(times, noise, monotone=False)
    assert raw[2] < raw[1] < raw[4]


def test_an_engine_that_pads_may_be_quicker_with_wider_passes(monkeypatch: Any) -> None:
    class Odd(TableModel):
        """Four tokens take less than one."""

        def score(self, sequences: Any, tokens: Any, lengths: Any, logits: Any = "all") -> Any:
            time.sleep({1: 0.006, 2: 0.006}.get(tokens.shape[1], 0.003))
            return super().score(sequences, tokens, lengths, logits)

    class Padding(Odd):
        def pad_widths(self, width: Any) -> None:
            self.width = width

    monkeypatch.setattr("outrider.costs.measure.UNSETTLED", float("inf"))
    odd, padding = (measured_costs(kind(torch.full((3, 3), 1 / 3), name=kind.__name__)) for kind in (Odd, Padding))
    assert odd.verify(1) <= odd.verify(2) <= odd.verify(17)
    assert padding.verify_seconds[1] > 1.5 * padding.verify_seconds[4]
    assert {3, 5, 7} & padding.verify_seconds.keys() == {3, 5, 7}  # any of them may be worth filling up


def test_what_a_change_of_width_adds_is_measured(monkeypatch: Any) -> None:
    class Keeps(TableModel):
        """A pass of another width than the one before takes 5 ms more."""

        before = 0

        def keep_width(self, on: bool) -> None:
            self.on = on

        def score(self, sequences: Any, tokens: Any, lengths: Any, logits: Any = "all") -> Any:
            time.sleep(0.002 + 0.005 * (tokens.shape[1] != self.before))
            self.before = tokens.shape[1]
            return super().score(sequences, tokens, lengths, logits)

    monkeypatch.setattr("outrider.costs.measure.UNSETTLED", float("inf"))
    costs = measured_costs(Keeps(torch.full((3, 3), 1 / 3), name="keeps"))
    assert 0.003 < costs.change < 0.1
    assert Costs.from_dict(costs.to_dict()) == costs
    assert measured_costs(TableModel(torch.full((3, 3), 1 / 3), name="does not")).change == 0.0


def test_costs_are_kept_on_disk(target_folder: Path, cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("outrider.costs.measure.UNSETTLED", float("inf"))  # however busy the machine is
    model = outrider.load(target_folder)
    kept._measured.clear()
    first = measured_costs(model)
    assert list((cache / "costs").glob("*.json"))
    kept._measured.clear()
    assert measured_costs(model) == first


def test_a_table_that_can_be_neither_written_nor_removed_is_a_warning(
    target_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("outrider.costs.measure._measure", lambda model: (Costs({1: 7.0}), 0.0))
    model = outrider.load(target_folder)
    forget_costs(model)
    path = kept._path(kept._key(model))
    assert path is not None
    path.mkdir()
    assert measured_costs(model).verify(1) == 7.0
    assert "measured costs are not kept: " in caplog.text
    assert [one.name for one in (cache / "costs").iterdir() if one.name.startswith(".")] == []
    caplog.clear()
    assert review_costs(model, [(1, 10, 70.0)] * 20)
    assert "measured costs are not kept: " in caplog.text
    forget_costs(model)
    assert "kept costs can't be removed: " in caplog.text
    path.rmdir()
    forget_costs(model)


def test_a_table_that_real_passes_refute_is_not_there_for_the_next_process(
    target_folder: Path, cache: Path, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("outrider.costs.measure.UNSETTLED", float("inf"))  # however busy the machine is
    model = outrider.load(target_folder)
    forget_costs(model)
    said = measured_costs(model).verify(1, 10)

    def tables() -> int:
        return sum(kept._read(path).costs is not None for path in (cache / "costs").glob("*.json"))

    before = tables()
    assert not review_costs(model, [(1, 10, 1.5 * said)] * 20)
    assert not review_costs(model, [(1, 10, said + 1)] * 3)  # too few to tell
    assert review_costs(model, [(1, 10, said + 1)] * 20)
    assert "the next run measures it again" in caplog.text
    assert tables() == before - 1
    assert measured_costs(model).verify(1, 10) == said  # the same seed, the same tokens, as long as the process lasts
    assert not review_costs(model, [(1, 10, said + 1)] * 20)  # it is gone from the disk: said once
    kept._measured.clear()  # the next process has no table in memory, and has said nothing
    kept._refuted.clear()
    said = measured_costs(model).verify(1, 10)
    assert tables() == before
    assert said < 0.5
    assert review_costs(model, [(1, 10, said + 1)] * 20)
    forget_costs(model)  # a table measured anew is another one: it may be refuted again
    said = measured_costs(model).verify(1, 10)
    assert review_costs(model, [(1, 10, said + 1)] * 20)
    forget_costs(model)


def test_a_machine_that_refutes_every_table_keeps_one_in_the_end(
    target_folder: Path, cache: Path, monkeypatch: Any, caplog: Any
) -> None:
    """Attempts are counted over refuted tables, too: a busy machine would measure at every start else."""
    model = outrider.load(target_folder)
    forget_costs(model)
    made: list[float] = []

    def measured(model: Any) -> tuple[Costs, float]:
        made.append(1.0 + len(made))
        return Costs({1: made[-1]}), 2.0  # never settled

    monkeypatch.setattr("outrider.costs.measure._measure", measured)
    for _ in range(2 * GIVE_UP):
        kept._measured.clear()
        kept._refuted.clear()
        said = measured_costs(model).verify(1)
        review_costs(model, [(1, 10, 13 * said)] * 20)
    assert len(made) == GIVE_UP
    assert caplog.text.count("times what its cost table says") == kept.MOST_REFUTED
    caplog.clear()
    kept._measured.clear()
    assert measured_costs(model).verify(1) == min(made[kept.MOST_REFUTED + 2 :])  # the quickest since the last was refuted
    assert not caplog.text
    forget_costs(model)


def test_nothing_is_measured_for_plain_decoding(target_folder: Path, cache: Path, monkeypatch: Any) -> None:
    """But where a table is known, its passes are as wide as those with drafts, or rounding would tell them apart."""
    model = outrider.load(target_folder)
    forget_costs(model)
    padded: list[int] = []
    monkeypatch.setattr(type(model), "pad_widths", lambda model, width: padded.append(width(1, 10)))
    with monkeypatch.context() as patch:
        patch.setattr("outrider.costs.kept.measure_settled", lambda *_: pytest.fail("measured"))
        outrider.generate(model, "the quick", draft=None, num_draft_tokens=3, max_new_tokens=4)
        assert not padded
        with pytest.raises(pytest.fail.Exception, match="measured"):
            outrider.generate(model, "the quick", draft="prompt-lookup", max_new_tokens=4)
    monkeypatch.setattr("outrider.costs.measure._measure", lambda model: (Costs({1: 3.0, 2: 2.0}), 1.0))
    measured_costs(model)
    padded.clear()
    outrider.generate(model, "the quick", draft=None, max_new_tokens=4)
    assert padded == [2]
    forget_costs(model)


def test_slow_passes_are_repeated_less_often(monkeypatch: Any) -> None:
    """A pass of a second on a busy machine: what took four minutes takes the repetitions that tell whether it is busy."""
    clock = [0.0]
    monkeypatch.setattr("outrider.costs.measure.time.perf_counter", lambda: clock[0])

    def passes(seconds: float) -> int:
        made = []

        def time_one(timer: Any, n: int, again: bool = False) -> float:
            made.append(n)
            clock[0] += seconds
            return seconds

        with monkeypatch.context() as patch:
            patch.setattr(PassTimer, "time", time_one)
            measure_settled(TableModel(torch.eye(5, dtype=torch.float64)), 1)
        return len(made)

    assert passes(1.0) == 7 + 2 * 8
    assert passes(0.001) >= 7 + 4 * 8


def test_what_is_known_of_a_model_without_a_name_ends_with_it(monkeypatch: Any) -> None:
    """Its address may be another's one day, whose table must be refuted for itself."""
    monkeypatch.setattr("outrider.costs.measure.UNSETTLED", float("inf"))
    model = TableModel(torch.full((3, 3), 1 / 3), name="short-lived")
    said = measured_costs(model).verify(1, 10)
    assert review_costs(model, [(1, 10, said + 1)] * 20)
    known = kept._key(model)
    assert known in kept._refuted
    del model
    gc.collect()
    assert known not in kept._refuted
    assert known not in kept._measured


@pytest.mark.parametrize(("noise", "further", "kept_seconds"), [(1.0, 1, 6.5), (2.0, GIVE_UP - 5, 6.0)])
def test_a_busy_machine_measures_once_more_in_each_run_until_it_is_quiet_or_enough(
    noise: float, further: int, kept_seconds: float, target_folder: Path, cache: Path, monkeypatch: Any, caplog: Any
) -> None:
    model = outrider.load(target_folder)
    forget_costs(model)
    attempts = [(9.0, 3.0), (7.0, 2.0), (8.0, 5.0), (8.5, 2.0), (6.0, 2.0), *[(6.5, noise)] * further]
    found = iter([(Costs({1: seconds}), noise) for seconds, noise in attempts])
    monkeypatch.setattr("outrider.costs.measure._measure", lambda model: next(found))

    monkeypatch.setattr(kept, "_busy", [])

    def next_run() -> float:
        kept._measured.clear()
        return measured_costs(model).verify(1)

    assert next_run() == 7.0
    assert "the machine is busy" in caplog.text
    assert measured_costs(model).verify(1) == 7.0  # the same seed, the same tokens
    assert [next_run(), next_run()] == [7.0, 6.0]
    assert caplog.text.count("where a seed may give another text") == 1
    assert caplog.text.count("are measured again, too") == 2
    assert [next_run() for _ in range(further)][-1] == kept_seconds
    caplog.clear()
    assert next(found, None) is None
    assert next_run() == kept_seconds
    assert not caplog.text
    forget_costs(model)


@pytest.mark.parametrize(("a_second", "settled"), [(30, True), (200, False)])
def test_repetitions_that_agree_while_others_run_are_not_settled(a_second: int, settled: bool, monkeypatch: Any) -> None:
    """Beside two others of its kind a pass of 3 ms took 12 in each repetition, and in one run a whole second."""
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("outrider.costs.measure.time.perf_counter", lambda: next(clock))
    given_way = iter(a_second * torch.get_num_threads() * i for i in range(100))
    monkeypatch.setattr("outrider.costs.measure._preemptions", lambda: next(given_way))
    found = iter([(Costs({1: seconds}), 1.0) for seconds in (3.0, 2.0, 4.0)])
    monkeypatch.setattr("outrider.costs.measure._measure", lambda model: next(found))
    costs, made, agreed = measure_settled(TableModel(torch.eye(5, dtype=torch.float64)), 1)
    assert (costs.verify(1), made, agreed) == ((3.0, 1, True) if settled else (2.0, 3, False))


class _Follower(TableModel):
    """A model that comes after another, whose passes are counted."""

    def __init__(self, leader: TableModel) -> None:
        super().__init__(torch.eye(5, dtype=torch.float64) * 0.8 + 0.04)
        self._leader = leader

    @property
    def leader(self) -> TableModel:
        return self._leader


class _Counted(TableModel):
    passes = 0

    def score(self, *args: Any, **options: Any) -> Any:
        self.passes += 1
        return super().score(*args, **options)


def test_a_pass_right_after_another_of_the_same_model_has_none_of_its_leaders_before_it() -> None:
    leader = _Counted(torch.eye(5, dtype=torch.float64) * 0.8 + 0.04)
    with PassTimer(_Follower(leader), (1, 2), 4) as timer:
        assert timer.follows
        timer.time(1)
        assert leader.passes == 1
        timer.time(1, again=True)
        assert leader.passes == 1
    with PassTimer(leader, (1,), 4) as timer:
        assert not timer.follows


def test_what_comes_after_a_leader_is_measured_by_pairs_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By medians: a pass that finds its weights in the caches by chance does not count for all."""
    leader = _Counted(torch.eye(5, dtype=torch.float64) * 0.8 + 0.04)
    asked: list[tuple[int, bool]] = []
    first = iter([90.0, 80.0, 5.0, 3.0, 6.0, 5.0])

    def timed(timer: PassTimer, size: int, again: bool = False) -> float:
        asked.append((size, again))
        return 2.0 if again else next(first) if size == 1 else 5.5

    monkeypatch.setattr(PassTimer, "time", timed)
    costs, _, _ = measure_settled(_Follower(leader), 1, attempts=1)
    assert asked[:12] == [(1, False), (1, True)] * 6
    assert {size for size, _ in asked} == {1, 2, 5, 33}
    assert [costs.verify(n) for n in (1, 2, 5)] == [5.0, 5.5, 5.5]
    assert costs.warm == 3.0


def test_what_a_draft_saves_by_warm_caches_is_paid_by_its_first_token() -> None:
    drafter = ModelDrafter(_Counted(torch.eye(5, dtype=torch.float64) * 0.8 + 0.04))
    drafter._costs = Costs({1: 3.0, 2: 3.5}, warm=1.0)  # as measured for a head
    assert drafter.seconds == DraftSeconds(token=2.0, start=1.0)
    assert [drafter.seconds.of(n) for n in (0, 1, 3)] == [0.0, 3.0, 7.0]
    row = DraftRow([1, 2, 3], 3, RandomStream(0), TableSequence())
    drafter.begin([row], DraftContext(SamplingSettings(), drafter.model, 5, PhaseClock()))
    (prospect,) = drafter.prospects(row)
    assert (prospect.start_seconds, prospect.step_seconds) == (1.0, 2.0)
    assert Costs.from_dict(drafter._costs.to_dict()) == drafter._costs
