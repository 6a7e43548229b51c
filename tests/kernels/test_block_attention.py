"""Attention in blocks: the same bits for any number of queries and any neighbours, as near to the law as float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.models.attention import in_blocks
from outrider.models.attention.in_blocks import BLOCKS, adds_up_alike, columns_read
from outrider.models.attention.in_float64 import STEADY, use_steady_attention
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.int8_linear import largest_weight
from outrider.models.weights.quantized import quantize_to_int8
from outrider.prefill import prefill
from tests.helpers.kernels import HEADS
from tests.helpers.ragged import score, some_tokens
from tests.helpers.tiny_models import module, record_now

alike = adds_up_alike(6, 2, 16, torch.get_num_threads(), torch.float32)
pytestmark = [
    pytest.mark.skipif(largest_weight() is None, reason="this build of torch has no 8-bit kernels"),
    pytest.mark.skipif(not alike, reason="kernels here add up in another order for other widths"),
]


@pytest.fixture(scope="module", autouse=True)
def _torchs_kernels() -> Iterator[None]:
    """Ours have an attention of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.models.weights.quantized.kernels", lambda: None)
        yield


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    made = module("Llama", dtype=torch.float32, **HEADS)
    quantize_to_int8(made)
    assert made.config._attn_implementation == BLOCKS
    return TransformersModel(made)


def test_whole_blocks_and_parts_of_the_last_are_read() -> None:
    reads = {1: 64, 64: 64, 65: 128, 128: 128, 129: 192, 193: 512, 512: 512, 513: 576, 577: 640, 705: 1024, 1025: 1088}
    assert {longest: columns_read(longest, (64, 128, 192)) for longest in reads} == reads
    assert [columns_read(longest) for longest in (1, 512, 513)] == [512, 512, 1024]


def test_parts_that_are_summed_otherwise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = in_blocks._attention

    def by_columns(rows: torch.Tensor, key: torch.Tensor, *others: torch.Tensor, **named: object) -> tuple[torch.Tensor]:
        out: torch.Tensor = own(rows, key, *others, **named)[0]
        return (out * (1 + 2**-22) if key.shape[2] % 512 == 192 else out,)

    assert alike is not None
    monkeypatch.setattr(in_blocks, "_attention", by_columns)
    adds_up_alike.cache_clear()
    found = adds_up_alike(6, 2, 16, torch.get_num_threads(), torch.float32)
    adds_up_alike.cache_clear()
    assert found is not None
    assert found.parts == tuple(part for part in alike.parts if part != 192)


@pytest.mark.parametrize("last", [70, 140, 530, 600, 660])
def test_any_width_gives_the_same_bits_across_the_edges_of_blocks(model: TransformersModel, last: int) -> None:
    tokens, start = some_tokens(last, 1), last - 30
    found = []
    for width in (1, 2, 7, 30, last):
        sequence = model.open()
        at = 0 if width == last else start
        if at:
            prefill(model, [sequence], [tokens[:at]])
        parts = [score(model, [sequence], [tokens[i : min(i + width, last)]])[0] for i in range(at, last, width)]
        found.append(torch.cat(parts)[-30:])
        sequence.close()
    assert all(torch.equal(found[0], one) for one in found[1:])


def test_neighbours_of_other_lengths_leave_the_bits(model: TransformersModel) -> None:
    """They make a row read further blocks, of which all is masked."""
    texts = [some_tokens(length, seed) for seed, length in enumerate((40, 135, 620))]
    alone = []
    for text in texts:
        sequence = model.open()
        prefill(model, [sequence], [text[:-5]])
        alone.append(score(model, [sequence], [text[-5:]])[0])
        sequence.close()
    sequences = [model.open() for _ in texts]
    prefill(model, sequences, [text[:-5] for text in texts])
    together = score(model, sequences, [text[-5:] for text in texts])
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    for sequence in sequences:
        sequence.close()


def test_it_is_the_attention_of_float64_but_for_rounding() -> None:
    made = module("Llama", dtype=torch.float32, **HEADS)
    blocks, steady = copy.deepcopy(made), copy.deepcopy(made)
    assert in_blocks.use_block_attention(blocks)
    use_steady_attention(steady)
    text = some_tokens(600, 2)
    with torch.inference_mode():
        got, want = (one(input_ids=torch.tensor([text]), use_cache=False).logits[0] for one in (blocks, steady))
    assert float((got - want).abs().max() / want.std()) < 1e-4
    assert not torch.equal(got, want), "both are the same function, and one of them is not tried here"


@pytest.mark.parametrize(("architecture", "overrides"), [("Llama", {"num_key_value_heads": 1}), ("Gemma2", {}), ("T5", {})])
def test_what_it_does_not_apply_to_is_computed_in_float64(architecture: str, overrides: dict[str, Any]) -> None:
    """One head of keys for all, scores that are capped, encoder-decoders."""
    made = module(architecture, dtype=torch.float32, **overrides)
    quantize_to_int8(made)
    assert made.config._attn_implementation == STEADY


def test_where_kernels_add_up_otherwise_float64_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = in_blocks._attention

    def by_width(rows: torch.Tensor, *others: torch.Tensor, **named: object) -> tuple[torch.Tensor]:
        out: torch.Tensor = own(rows, *others, **named)[0]
        return (out if rows.shape[2] > 8 else out * (1 + 2**-22),)

    monkeypatch.setattr(in_blocks, "_attention", by_width)
    adds_up_alike.cache_clear()
    made = module("Llama", dtype=torch.float32, **HEADS)
    quantize_to_int8(made)
    adds_up_alike.cache_clear()
    assert made.config._attn_implementation == STEADY


@pytest.mark.slow
def test_recorded_passes_read_the_same_blocks(model: TransformersModel, cache: object) -> None:
    tokens = some_tokens(640, 3)

    def passes() -> torch.Tensor:
        sequence = model.open()
        prefill(model, [sequence], [tokens[:500]])
        parts = [score(model, [sequence], [tokens[i : i + 7]])[0] for i in range(500, 640, 7)]
        sequence.close()
        return torch.cat(parts)

    ordinary = passes()
    record_now(model)
    assert model.recorded is not None
    assert torch.equal(passes(), ordinary)
    model.recorded = None
