"""Rows that are sampled otherwise share passes: each has the tokens that it has alone, and fails alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from outrider.decode import Decoder, Request, decode, read_together, step_together
from outrider.draft_length import DraftLength, FixedLength
from outrider.drafters import Drafter, ModelDrafter
from outrider.errors import NumericalError, ParameterError
from outrider.models.base import Sequence, WhichLogits, has_same_bits
from outrider.models.table import TableModel, TableSequence
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.sampling import SamplingSettings
from outrider.support.clock import PhaseClock
from tests.helpers.every_drafter import DRAFTERS, LENGTHS
from tests.helpers.marks import thinned
from tests.helpers.positions import stream_by_position
from tests.helpers.samples import V
from tests.helpers.toys import PROMPT, SETTINGS, table

LONG = 12


class Counted(TableModel):
    """Notes how many rows each of its passes had, and what it has opened."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(table(1, V, dtype=dtype)._probs, name="table-1")
        self.passes: list[int] = []
        self.opened: list[TableSequence] = []

    def open(self, reserve: int = 0) -> TableSequence:
        self.opened.append(super().open(reserve))
        return self.opened[-1]

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        self.passes.append(len(sequences))
        return super().score(sequences, tokens, lengths, logits)

    @property
    def all_closed(self) -> bool:
        return not any(sequence.length for sequence in self.opened)


def requests(group: int, count: int = 3) -> list[Request]:
    return [Request(PROMPT, LONG + 3 * i - group, RandomStream(group, i)) for i in range(count)]


def all_rounds(decoders: list[Decoder]) -> Iterator[list[list[tuple[int, Round]]]]:
    while any(decoder.active for decoder in decoders):
        made = step_together(decoders)
        assert not any(isinstance(one, Exception) for one in made)
        yield made  # type: ignore[misc]
        for decoder in decoders:
            decoder.dismiss()


def texts_of(decoders: list[Decoder]) -> list[dict[int, list[int]]]:
    texts: list[dict[int, list[int]]] = [{} for _ in decoders]
    for made in all_rounds(decoders):
        for found, rounds in zip(texts, made, strict=True):
            for number, record in rounds:
                found.setdefault(number, []).extend(record.tokens)
    return texts


@pytest.mark.parametrize(("kind", "length"), thinned((kind for kind in DRAFTERS if "memory" not in kind), LENGTHS))
def test_rows_of_every_setting_have_the_tokens_that_they_have_alone(kind: str, length: str) -> None:
    drafter, policy = DRAFTERS[kind](), LENGTHS[length]
    want = [decode(table(1, V), requests(i), how, drafter, policy)[0] for i, how in enumerate(SETTINGS.values())]
    target, clock = Counted(), PhaseClock()
    decoders = [Decoder(target, (), how, drafter, policy, clock=clock) for how in SETTINGS.values()]
    for i, decoder in enumerate(decoders):
        decoder.admit(requests(i))
    target.passes.clear()
    texts = texts_of(decoders)
    assert [[found[i] for i in range(3)] for found in texts] == want
    assert max(target.passes) == 3 * len(SETTINGS)  # one pass for all of them
    if "self" not in kind:
        assert len(target.passes) <= LONG + 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("draft", [None, "model"])
def test_by_position_and_not_may_share_passes(draft: str | None, dtype: torch.dtype) -> None:
    target, clock = Counted(dtype), PhaseClock()
    drafter = ModelDrafter(table(2, V, dtype=dtype), step_seconds=0.3) if draft else None
    how = SETTINGS["temperature 1"]
    by_position = [Request(PROMPT, LONG, stream_by_position(i)) for i in range(2)]
    want = [
        decode(target, by_position, how, drafter, FixedLength(2))[0],
        decode(target, requests(1), how, drafter, FixedLength(2))[0],
    ]
    decoders = [Decoder(target, (), how, drafter, FixedLength(2), clock=clock) for _ in range(2)]
    decoders[0].admit(by_position)
    decoders[1].admit(requests(1))
    assert [list(found.values()) for found in texts_of(decoders)] == want


def test_they_join_and_leave_at_any_time() -> None:
    target, clock, drafter = Counted(), PhaseClock(), ModelDrafter(table(2, V), step_seconds=0.3)
    names = ("greedy", "top-p", "penalties")
    want = [decode(table(1, V), requests(i), SETTINGS[name], drafter, FixedLength(2))[0] for i, name in enumerate(names)]
    decoders = [Decoder(target, (), SETTINGS[name], drafter, FixedLength(2), clock=clock) for name in names]
    found: list[dict[int, list[int]]] = [{} for _ in names]
    waiting = [requests(i) for i in range(3)]
    ended: list[int] = []
    for turn in range(40):
        if turn < 9:
            decoders[turn % 3].admit([waiting[turn % 3].pop(0)])
        if turn == 4:
            decoders[1].end(decoders[1].active[0])
            ended.append(len(decoders[1].rows))
        for place, made in enumerate(step_together(decoders)):
            assert not isinstance(made, Exception)
            for number, record in made:
                found[place].setdefault(number, []).extend(record.tokens)
    assert not any(decoder.active for decoder in decoders)
    assert [found[0][i] for i in range(3)] == want[0]
    assert [found[2][i] for i in range(3)] == want[2]
    cut = found[1][0]
    assert cut == want[1][0][: len(cut)] != want[1][0]
    assert [found[1][i] for i in (1, 2)] == want[1][1:]
    assert target.all_closed


def test_what_a_round_took_is_shared_by_all_rows() -> None:
    target, clock = Counted(), PhaseClock()
    decoders = [Decoder(target, (), SETTINGS[name], clock=clock) for name in ("greedy", "top-k")]
    for i, decoder in enumerate(decoders):
        decoder.admit(requests(i))
    first, second = step_together(decoders)
    assert isinstance(first, list)
    assert isinstance(second, list)
    seconds = [record.seconds for _, record in [*first, *second]]
    assert seconds == [seconds[0]] * 6
    assert seconds[0]["verify"] > 0.0


class _FailsError(Exception):
    pass


def _failing(after: int) -> Callable[[Tensor, Tensor], Tensor]:
    def processor(tokens: Tensor, logits: Tensor) -> Tensor:
        if tokens.shape[-1] >= len(PROMPT) + after:
            raise _FailsError
        return logits

    return processor


@pytest.mark.parametrize("draft", [None, "model"])
def test_a_processor_that_fails_ends_its_own_rows_alone(draft: str | None) -> None:
    """Be it asked by the draft or by the rule."""
    target, clock = Counted(), PhaseClock()
    drafter: Drafter | None = ModelDrafter(table(2, V), step_seconds=0.3) if draft else None
    length: DraftLength | None = FixedLength(2) if draft else None
    want = decode(table(1, V), requests(0), SETTINGS["top-p"], drafter, length)[0]
    faulty = SamplingSettings(temperature=1.0, processors=(_failing(3),))
    decoders = [Decoder(target, (), how, drafter, length, clock=clock) for how in (SETTINGS["top-p"], faulty)]
    for decoder in decoders:
        decoder.admit(requests(0))
    found: dict[int, list[int]] = {}
    errors, going = [], list(decoders)
    while decoders[0].active:
        first, *others = step_together(going)
        assert not isinstance(first, Exception)
        for number, record in first:
            found.setdefault(number, []).extend(record.tokens)
        if others and isinstance(others[0], Exception):
            errors.append(others[0])
            going = decoders[:1]
    assert [found[i] for i in range(3)] == want
    assert [type(error) for error in errors] == [_FailsError]
    with pytest.raises(ParameterError, match="an earlier round has failed"):
        decoders[1].step()
    (again,) = decoders[0].admit([Request(PROMPT, 4, RandomStream(3))])
    with pytest.raises(ParameterError, match="an earlier round has failed"):
        step_together(decoders)
    while again.finish_reason is None:  # which has not stopped the others
        decoders[0].step()
    decoders[1].close()
    assert target.all_closed


def test_a_row_without_a_law_ends_alone_if_that_is_wanted() -> None:
    target = Counted()
    target._probs[1, 2] = torch.nan  # after 1, 2; its rows are a view
    length = [Request([0, 1, 2], 5, RandomStream(0)), Request([0, 0], 3, RandomStream(1))]
    with pytest.raises(NumericalError):
        Decoder(target, length, SETTINGS["greedy"]).rounds().__next__()
    decoder = Decoder(target, (), SETTINGS["greedy"], failing_alone=True)
    rows = decoder.admit(length)
    made = decoder.step()
    assert [number for number, _ in made] == [1]
    assert isinstance(rows[0].error, NumericalError)
    assert (rows[0].finish_reason, rows[1].error) == ("cancelled", None)
    assert decoder.active == [rows[1]]
    assert [sequence.length for sequence in target.opened[-2:]] == [0, 2]
    decoder.close()
    assert target.all_closed


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_models_in_one_pass_give_what_they_give_alone(target_folder: Any, draft_folder: Any, dtype: str) -> None:
    """With a draft model, alternatives beside its draft, and rows laid end to end (int8)."""
    target, draft = (outrider.load(folder, dtype=dtype) for folder in (target_folder, draft_folder))
    beside = 2 if dtype == "float64" else None
    hows = [SETTINGS[name] for name in ("greedy", "temperature 0.6", "penalties")]
    prompts = [[5, 6, 7, 8, 9, 10 + i] for i in range(2)]

    def asked(group: int) -> list[Request]:
        return [Request(prompt, 10 + group, RandomStream(group, i)) for i, prompt in enumerate(prompts)]

    drafter = ModelDrafter(draft, step_seconds=0.3)
    want = [decode(target, asked(i), how, drafter, FixedLength(3), alternatives=beside)[0] for i, how in enumerate(hows)]
    clock = PhaseClock()
    decoders = [Decoder(target, (), how, drafter, FixedLength(3), alternatives=beside, clock=clock) for how in hows]
    for i, decoder in enumerate(decoders):
        decoder.admit(asked(i))
    assert [list(found.values()) for found in texts_of(decoders)] == want


@pytest.mark.parametrize("budget", [1, 4, 7, None])
def test_prompts_are_read_a_part_at_a_time_the_first_ones_first(budget: int | None) -> None:
    """Rows take part in rounds once theirs has been read, and have the tokens that they have alone."""
    target, clock, drafter = Counted(), PhaseClock(), ModelDrafter(table(2, V), step_seconds=0.3)
    names, prompts = ("greedy", "top-p"), [[(i * j) % V for i in range(length)] for j, length in enumerate((9, 1, 6, 12))]
    of = [0, 1, 1, 0]  # whose

    def asked(i: int) -> Request:
        return Request(prompts[i], LONG, RandomStream(5, i))

    want = [decode(table(1, V), [asked(i)], SETTINGS[names[of[i]]], drafter, FixedLength(2))[0][0] for i in range(4)]
    decoders = [Decoder(target, (), SETTINGS[name], drafter, FixedLength(2), clock=clock) for name in names]
    rows = [decoders[of[i]].admit([asked(i)], read=False)[0] for i in range(4)]
    assert not any(decoder.active for decoder in decoders)
    assert step_together(decoders) == [[], []]
    joined = []
    for _ in range(100):
        left = sum(row.left_to_read for row in rows if row.reading)
        read_together(decoders, budget)
        if left:
            now = sum(row.left_to_read for row in rows if row.reading)
            assert now == (0 if budget is None else max(0, left - budget))
        joined.append([row.reading for row in rows])
        if not any(row.finish_reason is None for row in rows):
            break
        assert not any(isinstance(made, Exception) for made in step_together(decoders))
    assert [row.tokens[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)] == want
    assert all(reading == sorted(reading) or not reading[1] for reading in joined)
    assert all(row.prefill_seconds > 0 for row in rows)
    assert target.all_closed


def test_a_prompt_that_can_not_be_read_ends_its_own_group() -> None:
    class Deaf(Counted):
        def score(
            self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
        ) -> Tensor | None:
            if logits == "none" and 2 in tokens:
                raise MemoryError
            return super().score(sequences, tokens, lengths, logits)

    target, clock = Deaf(), PhaseClock()
    decoders = [Decoder(target, (), SETTINGS[name], clock=clock) for name in ("greedy", "top-p")]
    (going,) = decoders[0].admit([Request([0, 1, 0], 5, RandomStream(0))])
    unread = [Request(prompt, 5, RandomStream(0)) for prompt in ([0, 1, 0, 1], [0, 2, 0])]
    first, second = decoders[0].admit(unread, read=False)
    (other,) = decoders[1].admit([Request([0, 1, 0], 5, RandomStream(0))], read=False)
    read_together(decoders, 3)
    assert (first.reading, second.reading, second.error) == (False, True, None)
    read_together(decoders, 2)
    assert [type(row.error) for row in (going, first, second, other)] == [type(None), type(None), MemoryError, type(None)]
    read_together(decoders)
    assert [len(made) for made in step_together(decoders) if isinstance(made, list)] == [2, 1]
    for decoder in decoders:
        decoder.close()
    assert target.all_closed


def test_decoders_of_other_targets_or_clocks_share_no_pass() -> None:
    one, other = (Decoder(table(1, V), (), SETTINGS["greedy"]) for _ in range(2))
    for decoder in (one, other):
        decoder.admit(requests(0, 1))
    with pytest.raises(ParameterError, match="must have one target and one clock"):
        step_together([one, other])
    assert one.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_by_position_beside_anothers_alternatives(target_folder: Any, draft_folder: Any, dtype: str) -> None:
    """They have none of their own, for their bits' sake; those of others lie in the same pass."""
    target, draft = (outrider.load(folder, dtype=dtype) for folder in (target_folder, draft_folder))
    if dtype == "bfloat16" and not has_same_bits(target):
        pytest.skip("passes of other widths round otherwise here")
    drafter, how = ModelDrafter(draft, step_seconds=0.3), SETTINGS["temperature 1"]
    prompts = [[5, 6, 7, 8, 9, 10 + i] for i in range(3)]

    def keyed() -> list[Request]:
        return [Request(prompt, 40, stream_by_position(i)) for i, prompt in enumerate(prompts)]

    want = decode(target, keyed(), how, drafter, FixedLength(3))[0]
    clock = PhaseClock()
    decoders = [
        Decoder(target, (), how, drafter, FixedLength(3), clock=clock),
        Decoder(target, (), how, drafter, FixedLength(3), alternatives=3, clock=clock),
    ]
    decoders[0].admit(keyed())
    decoders[1].admit([Request(prompt, 60, RandomStream(1, i)) for i, prompt in enumerate(prompts)])
    first, _ = texts_of(decoders)
    assert list(first.values()) == want
