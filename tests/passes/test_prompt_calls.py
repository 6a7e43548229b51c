"""Prompts of quantized models, read in calls from and to plain memory: bits, parts, what is refused, caches that grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads.autoregressive import AutoregressiveModel
from outrider.heads.opening import open_head
from outrider.kernels.models import kernels
from outrider.models.attention.shared_keys import WIDEST
from outrider.models.cache import slot_cache
from outrider.models.transformers_model import TransformersModel
from outrider.prefill import prefill
from tests.helpers.chains import ONE_CALL
from tests.helpers.heads import write_head
from tests.helpers.marks import thinned
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import made, pair
from tests.helpers.tiny_models import module, record_now

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


def kept_by(model: TransformersModel, prompts: list[list[int]]) -> list[Tensor]:
    """Keys, values and states of prompts that are read beside each other, and the logits of two tokens after them."""
    rows = [model.open() for _ in prompts]
    prefill(model, rows, prompts)
    held = [each[:, :, : max(map(len, prompts))].clone() for each in model.cache_rows(slice(0, len(rows)))]
    states = [model.states(row, 0, row.length, (1,)).clone() for row in rows]
    after = score(model, rows, [[7, 8]] * len(rows))
    for row in rows:
        row.close()
    cut = [each[i, :, : len(prompt)] for each in held for i, prompt in enumerate(prompts)]
    return [*cut, *states, *after]


@pytest.mark.parametrize("lengths", [(1,), (20,), (WIDEST,), (WIDEST + 1,), (3 * WIDEST + 5,), (40, 3, 90), (20,) * 6])
def test_prompts_are_read_in_calls_of_the_same_bits(lengths: tuple[int, ...], cache: Path, chains_called: list[int]) -> None:
    """Without logits, in parts; what is kept, and what follows, as by ordinary passes."""
    ordinary, quick = (made("Llama", "int8", max_position_embeddings=6 * WIDEST) for _ in range(2))
    for model in (ordinary, quick):
        model.keep_states((1,))
    record_now(quick)
    score(quick, [quick.open()], [[5]])  # makes room for states
    quick._open[0].close()
    prompts = [some_tokens(length, i) for i, length in enumerate(lengths)]
    wanted = kept_by(ordinary, prompts)
    chains_called.clear()
    got = kept_by(quick, prompts)
    parts = [min(WIDEST, sum(lengths) - at) for at in range(0, sum(lengths), WIDEST)]
    assert chains_called[: len(parts)] == parts
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("architecture", thinned(ONE_CALL))
def test_long_prompts_are_read_in_calls_of_the_same_bits(architecture: str, cache: Path, chains_called: list[int]) -> None:
    ordinary, quick = (made(architecture, "int8", max_position_embeddings=6 * WIDEST) for _ in range(2))
    record_now(quick)
    score(quick, [quick.open()], [[5]])
    quick._open[0].close()
    row, found = some_tokens(3 * WIDEST + 9, 1), []
    for model in (ordinary, quick):
        chains_called.clear()
        sequence = model.open()
        prefill(model, [sequence], [row[: 2 * WIDEST + 3]])
        prefill(model, [sequence], [row])  # a further turn
        found.append([*score(model, [sequence], [[7, 8]]), *(one.clone() for one in model.cache_rows(slice(0, 1)))])
        length = sequence.length
        sequence.close()
    assert chains_called[:5] == [WIDEST, WIDEST, 3, WIDEST, 6]
    (wanted, *kept), (got, *mine) = found
    assert torch.equal(wanted, got)
    assert all(torch.equal(a[:, :, :length], b[:, :, :length]) for a, b in zip(kept, mine, strict=True))


def test_what_an_ordinary_pass_refuses_is_refused_before_anything_is_read(cache: Path) -> None:
    _, quick = pair("Llama", "int8")
    rows = [quick.open() for _ in range(3)]
    prefill(quick, rows, [[5, 6, 7]] * 3)
    good = torch.tensor([some_tokens(70, i) for i in range(3)])
    for wrong in (quick.vocab_size, -1):
        bad = good.clone()
        bad[2, 69] = wrong
        with pytest.raises((IndexError, RuntimeError)):
            quick.score(rows, bad, [70, 70, 70], "none")
    with pytest.raises((IndexError, RuntimeError)):
        quick.score(rows, good[:2], [70, 70, 70], "none")
    assert [row.length for row in rows] == [3, 3, 3]


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_cache_whose_growing_was_interrupted_grows_to_the_end_later(
    at: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers' keys and values, then of states: no pass writes where there is no room, and the engine goes on."""
    ordinary, quick = (made("Llama", "int8", max_position_embeddings=4000) for _ in range(2))
    for model in (ordinary, quick):
        model.keep_states((1,))
    record_now(quick)
    score(quick, [quick.open()], [[5]])
    quick._open[0].close()
    grown, calls = slot_cache._grown, []

    def interrupted(*given: Any) -> Tensor:
        calls.append(given)
        if len(calls) == at:
            raise MemoryError
        return grown(*given)

    monkeypatch.setattr(slot_cache, "_grown", interrupted)
    with pytest.raises(MemoryError):
        quick.open(600)
    monkeypatch.setattr(slot_cache, "_grown", grown)
    prompts = [some_tokens(590, 1)]
    assert all(torch.equal(a, b) for a, b in zip(kept_by(ordinary, prompts), kept_by(quick, prompts), strict=True))
    held = [each for layer in quick._cache._held for each in (layer.keys, layer.values) if each is not None]
    assert {(each.shape[0], each.shape[2]) for each in held} == {(quick._cache.num_slots, quick._cache.capacity)}


def test_many_short_prompts_are_read_in_one_pass(cache: Path, chains_called: list[int]) -> None:
    _, quick = pair("Llama", "int8")
    rows = [quick.open() for _ in range(6)]
    chains_called.clear()
    prefill(quick, rows, [some_tokens(5, i) for i in range(6)])
    assert chains_called == [30]
    assert all(row.length == 5 for row in rows)


def test_a_head_reads_long_prompts_in_calls_of_the_same_bits(cache: Path, tmp_path: Path, chains_called: list[int]) -> None:
    target = made("Llama", "int8", max_position_embeddings=4 * WIDEST)
    record_now(target)
    path, row, found = write_head(tmp_path, "layered"), some_tokens(200, 3), []
    heads, base = [open_head(target, path, "int8") for _ in range(2)], target.open()
    prefill(target, [base], [row])
    for i, head in enumerate(heads):
        assert isinstance(head, AutoregressiveModel)
        head.recorded = None if i else head.recorded
        chains_called.clear()
        sequence = head.open_on(base)
        prefill(head, [sequence], [row[: 2 * WIDEST + 9]])
        assert chains_called == ([] if i else [WIDEST, WIDEST, 9])
        logits = head.score_few([sequence], torch.tensor([row[2 * WIDEST + 9 : 2 * WIDEST + 11]]), [2], "last")
        assert logits is not None
        held = [each[:, :, : sequence.length].clone() for each in head.cache_rows(slice(sequence.slot, sequence.slot + 1))]
        found.append([logits.clone(), *held])
        sequence.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_a_head_reads_prompts_of_several_rows_where_some_states_have_another_type(cache: Path, tmp_path: Path) -> None:
    """Those before a row's first token are in float32, the target's in bfloat16, and only for these there are calls."""
    target = TransformersModel(module("Llama", dtype=torch.bfloat16, max_position_embeddings=4 * WIDEST))
    record_now(target)
    head = open_head(target, write_head(tmp_path, "layered"), "int8")
    prompts, found = [some_tokens(40, i) for i in range(4)], []
    for together in (True, False):
        bases = [target.open() for _ in prompts]
        prefill(target, bases, prompts)
        rows = [head.open_on(base) for base in bases]
        for some in [rows] if together else [[row] for row in rows]:
            prefill(head, some, [prompt[:-1] for prompt, row in zip(prompts, rows, strict=True) if row in some])
        found.append([each[row.slot, :, : row.length].clone() for row in rows for each in head.cache_rows(slice(0, 8))])
        for row in (*rows, *bases):
            row.close()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-2, atol=1e-2)
