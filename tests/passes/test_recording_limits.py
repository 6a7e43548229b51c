"""Where recordings end: what they don't fit, reasons that pass, memory that is held. Found by a reader with fresh eyes."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM, LlamaMLP

import outrider
from outrider.models.attention.shared_keys import SHARED_KEYS, attend
from outrider.models.cache.slot_cache import MIN_CAPACITY
from outrider.models.passes import recorded
from outrider.models.passes.graph import trace_pass
from outrider.models.passes.model_code import ReachedCode, describe_code
from outrider.models.transformers_model import TransformersModel
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import made, pair
from tests.helpers.tiny_models import module, record_now


def one_token(model: TransformersModel, context: int) -> Tensor:
    """The logits of one token after a context, and of three."""
    found = []
    for width in (1, 3):
        sequence = model.open()
        tokens = some_tokens(context + width, 1)
        score(model, [sequence], [tokens[:context]])
        found.append(score(model, [sequence], [tokens[context:]])[0])
        sequence.close()
    return torch.cat(found)


def windowed(first: Callable[[Tensor], bool], window: int) -> Callable[..., Any]:
    """An attention whose queries see some keys only, where that is said."""
    plain = LlamaAttention.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **others: Any) -> Any:
        if attention_mask is not None and first(hidden_states):
            columns = torch.arange(attention_mask.shape[-1])
            newest = attention_mask.int().sum(-1, keepdim=True) - 1
            attention_mask = attention_mask & (columns > newest - window)
        return plain(self, hidden_states, *args, attention_mask=attention_mask, **others)

    return forward


def test_code_that_treats_a_lone_token_otherwise_is_not_recorded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", windowed(lambda states: states.shape[1] == 1, 4))
    model = made("Llama")
    record_now(model)
    assert model.recorded is None


@pytest.mark.slow
def test_a_number_in_the_code_that_was_changed_is_seen_beyond_what_is_compared(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows wider than the passes that are compared: the code itself is a part of what a recording is found by."""
    for wide in (200, 150):
        with monkeypatch.context() as patch:
            patch.setattr(LlamaAttention, "forward", windowed(lambda states: True, wide))
            ordinary, quick = pair("Llama", max_position_embeddings=512)
            assert torch.equal(one_token(ordinary, 230), one_token(quick, 230))


@pytest.mark.parametrize("decides", [lambda columns, width: 30 <= columns < 64, lambda columns, width: width == 16])
def test_decisions_by_sizes_in_between_are_not_recorded(decides: Callable[[int, int], bool], empty_cache: Path) -> None:
    model: Any = made("Llama")
    norm = model.module.model.norm

    class Deciding(type(norm)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out * 2 if decides(self.longest, x.shape[1]) else out

    plain = model.pass_arguments

    def arguments(tokens: Tensor, positions: Tensor, longest: int, *others: Any) -> dict[str, Any]:
        norm.longest = longest
        return plain(tokens, positions, longest, *others)  # type: ignore[no-any-return]

    norm.__class__ = Deciding
    model.pass_arguments = arguments
    record_now(model)
    assert model.recorded is None


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without recordings."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    return tmp_path / "empty" / "recorded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_of_ones_own_is_recorded_as_it_is_or_not_at_all(dtype: torch.dtype, cache: Path) -> None:
    """With transformers' attention and heads that share keys, which `load` would have replaced."""
    made_so: dict[str, Any] = {"dtype": dtype, "max_position_embeddings": 512}
    ordinary, quick = (TransformersModel(module("Llama", **made_so), name="own") for _ in range(2))
    record_now(quick)
    for context in (5, 130, 200):
        assert torch.equal(one_token(ordinary, context), one_token(quick, context))


def test_reasons_that_pass_are_not_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Llama")

    def fails(*args: Any) -> Any:
        raise MemoryError("no memory just now")

    with monkeypatch.context() as patch:
        patch.setattr(recorded, "trace_pass", fails)
        record_now(model)
    assert model.recorded is None
    assert not empty_cache.exists() or not list(empty_cache.iterdir())
    record_now(model)
    assert model.recorded is not None


def test_two_threads_record_two_models(empty_cache: Path) -> None:
    models = [made("Llama"), made("Llama", intermediate_size=64)]
    threads = [threading.Thread(target=record_now, args=[model]) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(model.recorded is not None for model in models)


def test_an_attention_of_the_users_own_stays(empty_cache: Path) -> None:
    def own(*args: Any, **others: Any) -> Any:
        return attend(*args, **others)

    table: Any = ALL_ATTENTION_FUNCTIONS
    for name in ("sdpa", SHARED_KEYS):
        table[name] = own
        try:
            record_now(made("Qwen3"))
            assert table[name] is own
        finally:
            del table[name]


@pytest.mark.slow
def test_recording_takes_no_slots_and_growth_frees_what_was_there(empty_cache: Path) -> None:
    """A recording for several rows is made while one runs, and views of the cache were held until the next pass."""
    _, model = pair("Llama")
    cache = model._cache
    row = model.open()
    score(model, [row], [[5, 6, 7]])
    slots = cache.num_slots
    assert slots < 3
    assert model.recorded is not None
    assert model.recorded.of(3, 2) is not None
    assert (cache.num_slots, cache.capacity) == (slots, MIN_CAPACITY)
    assert cache.views
    cache.reserve(1, 2 * MIN_CAPACITY)
    assert not cache.views


def test_damage_that_still_reads_as_a_graph_is_made_again(empty_cache: Path) -> None:
    ordinary, quick = pair("Llama")
    (kept,) = empty_cache.iterdir()
    text = kept.read_text()
    at = text.rindex("prim::ListConstruct(")
    kept.write_text(text[:at] + "prim::ListConstruct()" + text[text.index(")", at) + 1 :])
    record_now(quick)
    assert kept.read_text() == text
    assert torch.equal(one_token(ordinary, 9), one_token(quick, 9))


def test_nothing_is_left_where_a_recording_could_not_be_moved_to_its_place(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(os, "replace", fails)
    model = made("Llama")
    record_now(model)
    assert model.recorded is not None
    assert list(empty_cache.iterdir()) == []


def test_hooks_for_all_modules_and_autocast_have_ordinary_passes(cache: Path) -> None:
    ordinary, quick = pair("Llama")
    hook: Any = torch.nn.modules.module.register_module_forward_hook(
        lambda part, given, out: out * 2 if isinstance(part, LlamaMLP) else None
    )
    try:
        assert torch.equal(one_token(ordinary, 9), one_token(quick, 9))
    finally:
        hook.remove()
    unpacked, fresh = (TransformersModel(module("Qwen3"), name="own") for _ in range(2))
    record_now(fresh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(one_token(unpacked, 9), one_token(fresh, 9))


def test_packed_layers_take_what_autocast_makes(target_folder: Path) -> None:
    """Their own kind of numbers alone, on processors whose kernels know no others."""
    packed, plain = outrider.load(target_folder, dtype="float32"), outrider.load(target_folder, dtype="float32", pack=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [outrider.generate(model, "the quick", draft=None, max_new_tokens=3) for model in (packed, plain)]
    assert [len(one.tokens) for one in found] == [3, 3]


def test_a_pass_over_a_model_with_a_cache_of_its_own_leaves_it_alone(cache: Path) -> None:
    _, model = pair("Llama")
    row = model.open()
    before = score(model, [row], [[5, 6, 7]])[0]
    twin = model.with_a_cache_of_its_own()
    score(twin, [twin.open(), twin.open()], [[9, 9, 9, 9], [8, 8, 8, 8]])
    row.truncate(1)
    assert torch.equal(score(model, [row], [[6, 7]])[0], before[1:])


def test_the_graph_is_that_of_the_attention_that_is_there(cache: Path) -> None:
    """transformers' own, for a module that was not given ours."""
    own = TransformersModel(module("Llama"), name="own")
    given = made("Llama")
    operations = [str(trace_pass(model, None).graph.graph) for model in (own, given)]
    assert operations[0] != operations[1]


def scaled(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    def other(*args: Any, **options: Any) -> Any:
        first, *rest = function(*args, **options)
        return first * by, *rest

    return other


class _Partial:
    """`forward` with an option that is fixed."""

    def __init__(self, by: float) -> None:
        self.method = functools.partialmethod(self.forward, by)

    @staticmethod
    def forward(part: LlamaMLP, by: float, x: Tensor) -> Tensor:
        out: Tensor = part.down_proj(part.act_fn(part.gate_proj(x)) * part.up_proj(x))
        return out * by


REPLACED: dict[str, Callable[[pytest.MonkeyPatch, float], None]] = {
    "a method": lambda patch, by: patch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(x) * by),
    "a method with an option": lambda patch, by: patch.setattr(LlamaMLP, "forward", _Partial(by).method),
    "a function that methods name": lambda patch, by: patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", scaled(modeling_llama.apply_rotary_pos_emb, by)
    ),
    "the attention that is chosen": lambda patch, by: patch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping, SHARED_KEYS, scaled(attend, by)
    ),
}


@pytest.mark.parametrize("what", REPLACED)
def test_another_function_is_other_code(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next start, and of the process that it is replaced in."""
    found = module("Llama", 1)
    found.config._attn_implementation = SHARED_KEYS
    before, reached = describe_code(found), ReachedCode(found)
    assert reached.unchanged()
    told = [before]
    for by in (2.0, 3.0):
        with monkeypatch.context() as patch:
            REPLACED[what](patch, by)
            assert not reached.unchanged()
            told.append(describe_code(found))
    assert told[0] != told[1] != told[2] != told[0]
    assert describe_code(found) == before
    assert reached.unchanged()


def test_a_number_that_a_part_holds_is_told() -> None:
    found = module("Llama", 1)
    before = describe_code(found)
    found.model.layers[0].self_attn.scaling *= 2
    assert describe_code(found) != before


def test_a_file_that_the_models_file_calls_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model whose folder brings two files: the one with its classes, and one that helps it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toy_of_two_files.py").write_text(
        "import torch\nimport toy_helper\n\n\nclass Toy(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x * toy_helper.scale()\n"
    )
    told = []
    for number in (2, 3, 2):
        (tmp_path / "toy_helper.py").write_text(f"def scale():\n    return {number}\n")
        for name in ("toy_helper", "toy_of_two_files"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        toy = importlib.import_module("toy_of_two_files").Toy()
        sys.dont_write_bytecode = before
        told.append(ReachedCode(toy).digest)
    assert told[0] == told[2] != told[1]


def test_a_method_replaced_after_recording_shows_in_the_next_sequence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary, quick = pair("Llama")
    tokens = some_tokens(9, 1)
    before = score(quick, [quick.open()], [tokens])[0]
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))))
    wanted, got = (score(model, [model.open()], [tokens])[0] for model in (ordinary, quick))
    assert torch.equal(wanted, got)
    assert not torch.equal(before, got)


class OfOnesOwn(LlamaForCausalLM):  # type: ignore[misc]
    """May have read a file beside its weights."""


def test_a_folder_is_told_where_code_of_ones_own_may_have_read_in_it() -> None:
    for kind, same in ((LlamaForCausalLM, True), (OfOnesOwn, False)):
        told = []
        for folder in ("a", "b"):
            model = module("Llama")
            model.__class__, model.name_or_path = kind, folder
            told.append(describe_code(model))
        assert (told[0] == told[1]) == same
