"""The OpenVINO engine gives the logits of the plain forward pass, however the tokens are fed; quantized, nearly."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import outrider
from outrider.errors import ContextLengthError, ModelError, ParameterError
from outrider.models.base import has_same_bits, is_flat
from outrider.models.choices import QUANTIZED
from outrider.models.loading import load_openvino
from outrider.models.openvino.blocks import Blocks
from outrider.models.openvino.engine import BLOCK, OpenVinoModel
from outrider.models.openvino.saved import Weights
from outrider.models.steady_width import SteadyWidth
from outrider.models.weights.quantized import can_quantize
from outrider.prefill import prefill
from outrider.support.device_data import pad_rows
from tests.helpers.marks import slow, thinned
from tests.helpers.openvino_engine import CLOSE, opened, score
from tests.helpers.ragged import some_tokens
from tests.helpers.tiny_models import CONFIGS

REFUSED = {"Gemma2", "GPTJ", "Mixtral"}


def reference(plain: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


@pytest.mark.parametrize("architecture", thinned([name for name in CONFIGS if name not in REFUSED]))
def test_ragged_calls_and_rollbacks_give_the_logits_of_the_plain_pass(architecture: str, cache: Path) -> None:
    model, plain = opened(architecture)
    lengths = (90, 70, 50)
    rows = [some_tokens(n, n) for n in lengths]
    wanted = [reference(plain, row) for row in rows]
    sequences = [model.open() for _ in rows]
    read = (64, 33, 11)  # on a block's edge, just past one, inside the first
    prefill(model, sequences, [row[:n] for row, n in zip(rows, read, strict=True)])
    score(model, sequences, [[4, 5, 6, 7], [8], some_tokens(30, 1)])  # rejected
    for sequence, length in zip(sequences, read, strict=True):
        sequence.truncate(length)
    for start, width in ((0, 3), (3, 1), (4, 6)):
        parts = [row[n + start : n + start + width] for row, n in zip(rows, read, strict=True)]
        for got, want, n in zip(score(model, sequences, parts), wanted, read, strict=True):
            torch.testing.assert_close(got, want[n + start : n + start + width], atol=CLOSE, rtol=0)
    parted = score(model, [sequences[2], sequences[0]], [rows[2][21:26], rows[0][74:77]])
    torch.testing.assert_close(parted[0], wanted[2][21:26], atol=CLOSE, rtol=0)
    torch.testing.assert_close(parted[1], wanted[0][74:77], atol=CLOSE, rtol=0)
    last = model.score(sequences[:2], *pad_rows([rows[0][77:79], rows[1][43:44]], model.device), "last")
    assert last is not None
    torch.testing.assert_close(last[1, 0], wanted[1][43], atol=CLOSE, rtol=0)
    torch.testing.assert_close(last[0, 0], wanted[0][78], atol=CLOSE, rtol=0)


def test_prompts_that_begin_alike_share_blocks_and_stay_right(cache: Path) -> None:
    model, plain = opened("Llama")
    common, ends = some_tokens(3 * BLOCK + 5, 0), [some_tokens(7, s) for s in (1, 2)]
    first = model.open()
    prefill(model, [first], [common])
    second = model.open()
    prefill(model, [second], [common])
    assert first.blocks[:3] == second.blocks[:3]
    assert first.blocks[3] != second.blocks[3]
    for sequence, end in ((first, ends[0]), (second, ends[1])):
        got = score(model, [sequence], [end])[0]
        torch.testing.assert_close(got, reference(plain, common + end)[len(common) :], atol=CLOSE, rtol=0)
    # Rolled back into a shared block: the one that writes gets its own copy, the other keeps what it had.
    second.truncate(BLOCK + 3)
    other = some_tokens(9, 5)
    got = score(model, [second], [other])[0]
    torch.testing.assert_close(got, reference(plain, common[: BLOCK + 3] + other)[BLOCK + 3 :], atol=CLOSE, rtol=0)
    again = score(model, [first], [[5, 6]])[0]
    torch.testing.assert_close(again, reference(plain, common + ends[0] + [5, 6])[-2:], atol=CLOSE, rtol=0)
    # What ended is still known, until its place is needed.
    blocks = first.blocks[:3]
    first.close()
    second.close()
    third = model.open()
    prefill(model, [third], [common])
    assert third.blocks[:3] == blocks
    got = score(model, [third], [ends[0]])[0]
    torch.testing.assert_close(got, reference(plain, common + ends[0])[len(common) :], atol=CLOSE, rtol=0)


def test_blocks_are_found_by_what_they_hold_and_never_when_it_is_gone() -> None:
    """Against a plain model of what each block holds, under random use."""
    random = np.random.default_rng(0)
    blocks = Blocks(2, 6)
    rows: list[tuple[list[int], list[int]]] = []  # blocks, tokens
    holds: dict[int, tuple[int, ...]] = {}  # block → everything from the start to its end
    for _ in range(3000):
        if rows and (random.random() < 0.4 or blocks.available == 0):
            named, _ = rows.pop(random.integers(len(rows)))
            for block in reversed(named):
                blocks.give(block)
            continue
        tokens = random.integers(0, 2, 2 * random.integers(1, 4)).tolist()
        named, before = [], None
        for at in range(0, len(tokens), 2):
            found = blocks.find(before, tokens[at : at + 2])
            if found is not None:
                assert holds[found] == tuple(tokens[: at + 2])
            elif blocks.available:
                found = blocks.take()
                assert not any(found in other for other, _ in rows)
                assert found not in named
                holds[found] = tuple(tokens[: at + 2])
                blocks.publish(found, before, tokens[at : at + 2])
            else:
                break
            named.append(found)
            before = found
        rows.append((named, tokens))
        users = sum(len(named) for named, _ in rows)
        assert sum(blocks._users.values()) == users
    for named, _ in rows:
        for block in reversed(named):
            blocks.give(block)
    assert blocks.available == 6


@pytest.mark.parametrize(("weights", "off"), [("int8", 0.1), ("int4", 0.6)])
def test_quantized_weights_stay_near(weights: Weights, off: float, cache: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, plain = opened("Llama", weights, **sizes)
    tokens = some_tokens(20, 3)
    got, want = score(model, [model.open()], [tokens])[0], reference(plain, tokens)
    relative = float((got - want).square().mean().sqrt() / want.std())
    assert 1e-5 < relative < off


@pytest.mark.parametrize("weights", ["int8", slow("int4")])
def test_the_bits_of_a_tokens_logits_do_not_depend_on_the_width_of_the_pass(weights: Weights, cache: Path) -> None:
    # Large enough for the head to be quantized, deep enough for a last bit to grow.
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, _ = opened("Llama", weights, **sizes, num_hidden_layers=6, vocab_size=1024, max_position_embeddings=256)
    assert has_same_bits(model)
    tokens = some_tokens(52, 0)
    sequence, beside = model.open(), model.open()
    prefill(model, [sequence, beside], [tokens[:40], tokens[:33]])
    wanted: Tensor | None = None
    for width in (1, 2, 3, 4, 6, 12):
        parts = [score(model, [sequence], [tokens[at : at + width]])[0] for at in range(40, 52, width)]
        sequence.truncate(40)
        wanted = torch.cat(parts) if wanted is None else wanted
        assert torch.equal(torch.cat(parts), wanted)
    assert wanted is not None
    for company in ([5], [5, 6, 7], some_tokens(9, 9)):
        for width in (1, 2, 4):
            at = beside.length
            parted = [score(model, [beside, sequence], [company, tokens[i : i + width]])[1] for i in range(40, 52, width)]
            beside.truncate(at)
            sequence.truncate(40)
            assert torch.equal(torch.cat(parted), wanted)


def test_what_was_pretended_is_never_shared(cache: Path) -> None:
    model, plain = opened("Llama")
    timed, real = model.open(), model.open()
    timed.advance(BLOCK)
    prefill(model, [timed], [[0] * (BLOCK + 2)])
    prefill(model, [real], [[0] * (BLOCK + 2)])
    got = score(model, [real], [[3]])[0]
    torch.testing.assert_close(got, reference(plain, [0] * (BLOCK + 2) + [3])[-1:], atol=CLOSE, rtol=0)


def test_a_cache_that_does_not_fit_is_an_error_and_leaves_the_engine_whole(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = opened("Llama", max_position_embeddings=8192)
    sequence = model.open()
    zeros = np.zeros

    def full(shape: Any, *args: Any) -> Any:
        if shape[0] > 64:
            raise MemoryError
        return zeros(shape, *args)

    monkeypatch.setattr(np, "zeros", full)
    with pytest.raises(ModelError, match=r"does not fit into memory: lower max_new_tokens"):
        model.open(reserve=8000)
    monkeypatch.setattr(np, "zeros", zeros)
    tokens = some_tokens(3000, 0)
    prefill(model, [sequence], [tokens])
    torch.testing.assert_close(score(model, [sequence], [[4]])[0], reference(plain, [*tokens, 4])[-1:], atol=CLOSE, rtol=0)


def test_a_damaged_conversion_is_named(target_folder: Path, cache: Path) -> None:
    load_openvino(target_folder, "float32")
    (folder,) = (cache / "models").iterdir()
    (folder / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"can't be opened.*delete the folder"):
        load_openvino(target_folder, "float32")


@pytest.mark.slow
def test_generation_is_the_same_with_and_without_a_draft(target_folder: Path, draft_folder: Path, cache: Path) -> None:
    target = outrider.load(target_folder, engine="openvino", dtype="float32")
    assert isinstance(target, OpenVinoModel)
    plain = outrider.generate(target, "the quick brown fox", draft=None, max_new_tokens=80, ignore_eos=True)
    same = outrider.generate(outrider.load(target_folder), "the quick brown fox", max_new_tokens=80, ignore_eos=True)
    assert plain.tokens == same.tokens
    for draft in ("prompt-lookup", outrider.load(draft_folder), outrider.load(draft_folder, engine="openvino")):
        result = outrider.generate(
            target, "the quick brown fox", draft=draft, num_draft_tokens=4, max_new_tokens=80, ignore_eos=True
        )
        assert result.tokens == plain.tokens
        assert result.stats.drafted
    batch = outrider.generate(target, ["the quick brown fox", "a"], max_new_tokens=40, ignore_eos=True)
    assert batch[0].tokens == plain.tokens[:40]


def test_what_cannot_be_paged_is_refused_by_name(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"Gemma2 \(gemma2\) can't be converted for OpenVINO.*softcap.*engine transformers"):
        opened("Gemma2")
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(sys.modules[transformers.GPTJForCausalLM.__module__]):
        with pytest.raises(ModelError, match=r"GPTJ.*its attention can't be replaced"):
            opened("GPTJ")
    with pytest.raises(ModelError, match=r"Mixtral \(mixtral\) can't be converted for OpenVINO"):
        opened("Mixtral")


def test_bad_input_is_named(target_folder: Path, cache: Path) -> None:
    with pytest.raises(ParameterError, match="dtype must be auto, int8, int4 or float32"):
        load_openvino(target_folder, "bfloat16")
    with pytest.raises(ParameterError, match="engine must be"):
        outrider.load(target_folder, engine="tpu")
    model = outrider.load(target_folder, engine="openvino", dtype="float32")
    sequence = model.open()
    assert model.max_length is not None
    with pytest.raises(ContextLengthError):
        model.score([sequence], *pad_rows([[3] * (model.max_length + 1)], model.device))
    sequence.close()
    with pytest.raises(ParameterError, match="tokens must be in"):
        model.score([model.open()], *pad_rows([[-1]], model.device))
    with pytest.raises(ParameterError, match="different ones"):
        model.score([twice := model.open(), twice], *pad_rows([[3], [3]], model.device))
    with pytest.raises(ParameterError, match="open sequences"):
        model.score([sequence], *pad_rows([[3]], model.device))


def test_a_narrower_pass_is_filled_up_until_that_costs_more_than_another_width() -> None:
    steady = SteadyWidth()
    assert [steady.of(n) for n in (2, 6, 4, 6, 5, 3, 6)] == [2, 6, 6, 6, 6, 6, 6], "what is used in full begins anew"
    assert [steady.of(n) for n in (2, 2, 2, 2, 2, 2)] == [6, 6, 6, 6, 2, 2], "4 + 4 + 4 + 4 are borne"
    assert steady.of(25) == 25
    assert steady.of(8) == 8, "17 at once are too many"
    assert [steady.of(n) for n in (3, 5, 2, 4, 2)] == [8, 8, 8, 5, 5], "down to the widest since"
    steady.forget()
    assert steady.of(1) == 1
    steady.on = False
    assert [steady.of(n) for n in (9, 2)] == [9, 2]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_was_filled_in_changes_no_bit_and_stays_within_the_context(weights: Weights, cache: Path) -> None:
    model, _ = opened("Llama", weights, max_position_embeddings=40)
    tokens = some_tokens(40, 3)
    parts, at = [], 0
    for count in (20, 6, 3, 1, 5, 2, 1, 1, 1):
        parts.append(tokens[at : at + count])
        at += count
    assert at == 40, "up to the last position"

    def logits_of(keep: bool) -> list[Tensor]:
        sequence = model.open()
        model.keep_width(keep)
        model.score([sequence], *pad_rows([parts[0]], model.device), "none")
        found = [score(model, [sequence], [part])[0] for part in parts[1:]]
        assert sequence.length == 40
        sequence.close()
        return found

    for kept, plain in zip(logits_of(True), logits_of(False), strict=True):
        assert torch.equal(kept, plain)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_is_filled_in_beside_other_rows_changes_no_bit(weights: Weights, cache: Path) -> None:
    """Three rows, each as long as the context in the end: the shortest one has less and less room for what is filled in."""
    model, _ = opened("Llama", weights, max_position_embeddings=40)
    assert is_flat(model)
    counts = [(1, 1, 1), (3, 1, 5), (1, 4, 1), (1, 1, 1), (2, 1, 1), (1, 3, 2), (1, 1, 1)]
    begins = [40 - sum(part) for part in zip(*counts, strict=True)]
    texts = [some_tokens(40, 5 + i) for i in range(3)]

    def logits_of(keep: bool) -> list[Tensor]:
        sequences = [model.open() for _ in texts]
        prefill(model, sequences, [text[:begin] for text, begin in zip(texts, begins, strict=True)])
        model.keep_width(keep)
        found, at = [], list(begins)
        for part in counts:
            found += score(model, sequences, [text[i : i + n] for text, i, n in zip(texts, at, part, strict=True)])
            at = [i + n for i, n in zip(at, part, strict=True)]
            assert [sequence.length for sequence in sequences] == at
        for sequence in sequences:
            sequence.close()
        return found

    for kept, plain in zip(logits_of(True), logits_of(False), strict=True):
        assert torch.equal(kept, plain)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_weights_fall_to_openvino_where_there_are_no_kernels(
    dtype: str, target_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if can_quantize(QUANTIZED[dtype]):
        assert not isinstance(outrider.load(target_folder, dtype=dtype), OpenVinoModel)
    monkeypatch.setattr("outrider.models.loading.can_quantize", lambda bits: bits != QUANTIZED[dtype])
    assert isinstance(outrider.load(target_folder, dtype=dtype), OpenVinoModel)
    with pytest.raises(ModelError, match=f"{dtype} can't be used"):
        outrider.load(target_folder, dtype=dtype, engine="transformers")
