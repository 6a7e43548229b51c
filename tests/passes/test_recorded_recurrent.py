"""Recorded passes of models that keep states: the bits of ordinary ones, and the states in between, however cut."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import PromptLookupDrafter
from outrider.kernels.recurrences import recurrence_kernels
from outrider.models.cache.recurrent_cache import STEPS
from outrider.models.cache.runs import Key, States
from outrider.models.passes import recorded
from outrider.models.passes.recording import Recording
from outrider.models.recurrent.model import RecurrentModel
from outrider.models.recurrent.traced import Layout
from outrider.models.transformers_model import TransformersModel
from outrider.prefill import prefill
from outrider.randomness import RandomStream
from tests.helpers.marks import slow
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import KINDS, made, pair, scored
from tests.helpers.requests import GREEDY, WARM
from tests.helpers.tiny_models import record_now

OFTEN = [("Lfm2", "bfloat16"), ("Qwen3_5", "float32"), ("Mamba2", "bfloat16")]
SELDOM = [
    *(("Lfm2", kind) for kind in KINDS if kind != "bfloat16"),
    *(("Qwen3_5", kind) for kind in KINDS[1:]),
    *((name, kind) for name in ("OlmoHybrid", "Bamba", "FalconH1") for kind in KINDS),
    *((name, kind) for name in ("Mamba", "Jamba") for kind in KINDS),
]


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if recurrence_kernels() is None:
        pytest.skip("no kernels here, without which steps are a loop of Python's")


class Counted:
    """What was asked of recordings: rows and tokens of each pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, ...]] = []
        plain = Recording.run

        def counting(recording: Recording, slots: slice, longest: int, *about: Tensor) -> Any:
            self.seen.append(tuple(about[0].shape))
            return plain(recording, slots, longest, *about)

        monkeypatch.setattr(Recording, "run", counting)


@pytest.mark.parametrize(("architecture", "kind"), [OFTEN[0], *(slow(*each) for each in (*OFTEN[1:], *SELDOM))])
def test_the_bits_are_those_of_ordinary_passes(
    architecture: str, kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary, quick = pair(architecture, kind)
    counted = Counted(monkeypatch)
    row, widths = some_tokens(96, 1), (1, 2, 3, 4, 5, 8, 1, 13, 1, STEPS)
    for wanted, got in zip(scored(ordinary, row, 20, widths), scored(quick, row, 20, widths), strict=True):
        assert torch.equal(wanted, got)
    assert counted.seen == [(1, width) for width in widths for _ in range(2)]


@pytest.mark.parametrize(("architecture", "kind"), [OFTEN[0], *(slow(*each) for each in (*OFTEN[1:], *SELDOM))])
def test_rows_that_are_cut_anywhere_go_on_from_there(architecture: str, kind: str, cache: Path) -> None:
    """Of several rows, some of which are scored; one is closed, and a copy takes its place."""
    found = []
    for model in pair(architecture, kind):
        model.keep_states()
        draw = random.Random(0)
        sequences = [model.open() for _ in range(3)]
        prefill(model, sequences, [some_tokens(n, n) for n in (20, 5, 11)])
        out: list[Tensor] = []
        for step in range(12):
            some = [sequence for sequence in sequences if draw.random() < 0.8] or sequences[:1]
            out += score(model, some, [some_tokens(draw.randint(1, 6), 9 * step + i) for i in range(len(some))])
            for sequence in some:
                sequence.truncate(sequence.length - draw.randint(0, 4))
            if step == 6:
                sequences.pop(0).close()
                sequences.append(model.open())
                model.copy_prefix(sequences[0], sequences[-1], sequences[0].length)
        found.append([*out, *(model.states(sequence, 0, sequence.length) for sequence in sequences)])
        for sequence in sequences:
            sequence.close()
    assert all(torch.equal(wanted, got) for wanted, got in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [*map(slow, KINDS)])
@pytest.mark.parametrize("architecture", ["Qwen3_5", *(slow(name) for name in ("Lfm2", "Mamba2", "Mamba"))])
def test_several_rows_are_recorded(architecture: str, kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch takes another convolution for many rows."""
    _, quick = pair(architecture, kind)
    sequences = [quick.open() for _ in range(3)]
    prefill(quick, sequences, [[5, 6, 7]] * 3)
    score(quick, sequences, [[5], [6], [7]])  # the first one is compared with ordinary ones
    score(quick, sequences, [[5, 6], [6], [7]])
    counted = Counted(monkeypatch)
    score(quick, sequences, [[5], [6], [7]])
    score(quick, sequences, [[5, 6, 7], [6], [7, 8]])
    score(quick, sequences[:2], [[5], [6]])
    score(quick, [sequences[0], sequences[2]], [[5], [6]])  # rows apart are not
    score(quick, sequences[:1], [[5] * (STEPS + 1)])  # nor what is taken at once
    at_once = isinstance(quick, RecurrentModel) and quick.recurrent_cache.goes_on
    assert counted.seen == [(3, 1), (3, 3), (2, 1), *([] if at_once else [(1, STEPS + 1)])]


@pytest.mark.parametrize(("architecture", "kind"), [slow("Lfm2", "float32"), slow("Mamba2", "bfloat16")])
def test_texts_are_the_same(architecture: str, kind: str, cache: Path) -> None:
    ordinary, quick = pair(architecture, kind)
    accepted: set[bool] = set()
    for sampling in (GREEDY, WARM):
        for number in range(3):
            asked = [Request(some_tokens(12, number) * 2, 40, RandomStream(0, number)) for _ in range(2)]
            wanted, _ = decode(ordinary, asked[:1], sampling, PromptLookupDrafter(), FixedLength(3))
            got, rounds = decode(quick, asked[1:], sampling, PromptLookupDrafter(), FixedLength(3))
            assert got == wanted
            accepted |= {number < each.accepted for each in rounds[0] for number in range(each.drafted)}
    assert accepted == {False, True}, accepted


def test_states_of_another_type_are_no_inputs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    counted = Counted(monkeypatch)
    for model in pair("Lfm2", "float32"):
        assert isinstance(model, RecurrentModel)
        sequence = model.open()
        prefill(model, [sequence], [[5, 6, 7]])
        score(model, [sequence], [[8]])
        empty = model.recurrent_cache._empty
        model.recurrent_cache._empty = {key: state.double() for key, state in empty.items()}
        counted.seen.clear()
        found.append(torch.cat(score(model, [sequence], [[9]]) + score(model, [sequence], [[3, 4]])))
    assert torch.equal(*found)
    assert not counted.seen


def test_what_cannot_be_recorded_is_scored_as_before(cache: Path) -> None:
    """Experts decide by what they are given."""
    ordinary, quick = made("Qwen3Next"), made("Qwen3Next")
    record_now(quick)
    for wanted, got in zip(*(scored(each, some_tokens(30, 1), 9, (1, 3, 1)) for each in (ordinary, quick)), strict=True):
        assert torch.equal(wanted, got)
    assert quick.recorded is None


@pytest.mark.parametrize("asks", [True, slow(False)])
def test_weights_are_multiplied_as_they_are_whether_they_ask_for_gradients_or_not(asks: bool, cache: Path) -> None:
    """By that torch decides how several rows are multiplied with Mamba's matrices in float32."""
    ordinary, quick = made("Mamba"), made("Mamba")
    for model in (ordinary, quick):
        model.module.requires_grad_(asks)
    record_now(quick)
    assert isinstance(quick.recorded, recorded.RecordedPasses)
    widths = (1, 3, 1, 5)
    for wanted, got in zip(*(scored(each, some_tokens(40, 1), 9, widths) for each in (ordinary, quick)), strict=True):
        assert torch.equal(wanted, got)
    assert quick.recorded.of(1, 3) is not None


@pytest.mark.slow
def test_the_next_start_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    ordinary, _ = pair("Qwen3_5")
    monkeypatch.setattr(recorded, "trace_pass", lambda *args: pytest.fail("traced again"))
    quick = made("Qwen3_5")
    record_now(quick)
    widths, row = (1, 4, 1), some_tokens(30, 2)
    for wanted, got in zip(scored(ordinary, row, 9, widths), scored(quick, row, 9, widths), strict=True):
        assert torch.equal(wanted, got)


def _stale(layout: Layout, tensors: Iterable[Tensor], count: int, plain: Any = Layout.states) -> dict[Key, States]:
    """A planted fault: what is left behind is a token too old."""
    made: dict[Key, States] = plain(layout, tensors, count)
    return {
        key: states if isinstance(states, list) else [states.after(count - 2, 0)] * count for key, states in made.items()
    }


def _zeros(layout: Layout, tensors: Iterable[Tensor], count: int, plain: Any = Layout.states) -> dict[Key, States]:
    """Another: nothing is known."""
    made: dict[Key, States] = plain(layout, tensors, count)
    return {key: [(one[-1] if isinstance(one, list) else one.last) * 0] * count for key, one in made.items()}


def _swapped(layout: Layout, left: Any, plain: Any = Layout.tensors) -> list[Tensor]:
    """Another: two layers' states change places."""
    found: list[Tensor] = plain(layout, left)
    half = len(found) // 2
    return [*found[half:], *found[:half]]


@pytest.mark.parametrize(("method", "planted"), [("states", _stale), slow("tensors", _swapped)])
def test_other_states_are_seen_when_a_model_is_recorded(
    method: str, planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(Layout, method, planted)
    model: TransformersModel = made("Lfm2")
    record_now(model)
    assert model.recorded is None or model.recorded.of(1, 3) is None


@pytest.mark.parametrize("planted", [_zeros, slow(_stale)])
def test_other_states_are_seen_in_the_next_start(planted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is compared going on from what it leaves, and from the middle."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    pair("Lfm2", "bfloat16")
    monkeypatch.setattr(Layout, "states", planted)
    model = made("Lfm2", "bfloat16")
    record_now(model)
    assert model.recorded is None or model.recorded.of(1, 3) is None


@pytest.mark.slow
def test_a_recording_is_of_mixers_that_go_by_the_same_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which do is tried with a model's weights: two of one configuration may differ in it."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    pair("Mamba2", "bfloat16")
    ordinary, quick = made("Mamba2", "bfloat16"), made("Mamba2", "bfloat16")
    for model in (ordinary, quick):
        assert isinstance(model, RecurrentModel)
        model._mixers = [replace(mixer, ruled=None) for mixer in model._mixers]
    record_now(quick)
    row, widths = some_tokens(40, 1), (1, 3, 1, 5)
    for wanted, got in zip(scored(ordinary, row, 9, widths), scored(quick, row, 9, widths), strict=True):
        assert torch.equal(wanted, got)


def test_a_recording_that_leaves_other_tensors_is_none(cache: Path) -> None:
    layout = Layout({(0, 0, "conv"): [torch.zeros(1)], (1, 0, "conv"): [torch.zeros(1)]})
    assert len(layout.states([torch.zeros(1)] * 2, 1)) == 2
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match="leaves other states than its model's layers"):
            layout.states([torch.zeros(1)] * count, 1)
