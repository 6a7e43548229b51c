"""Recorded passes whose weights are read once: what is done to weights and caches after that, what is left to hand over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.decode.loop import Decoder
from outrider.decode.row import Request
from outrider.draft_length import FixedLength
from outrider.drafters.early_exit import EarlyExitDrafter
from outrider.kernels.models import kernels
from outrider.models.cache.slot_cache import MIN_CAPACITY
from outrider.models.kernels.fusing import fuse
from outrider.models.passes.planned import PlannedGraph
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.helpers.marks import thinned
from tests.helpers.ragged import score, some_tokens
from tests.helpers.recorded import made, pair
from tests.helpers.tiny_models import record_now

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")
NEAR = MIN_CAPACITY - 9


def bounds(model: TransformersModel) -> list[Any]:
    return [bound for view in model._cache.views.values() for bound in view.made.values()]


def after(
    model: TransformersModel, tokens: list[int], changes: dict[int, Callable[[], None]], start: int = 0
) -> list[Tensor]:
    """Logits of one token and two more in turn after the first `start`, with something done to the model before some."""
    sequence, found = model.open(), []
    if start:
        score(model, [sequence], [tokens[:start]])
    for i in range(start, len(tokens), 3):
        changes.get(i, lambda: None)()
        found += [score(model, [sequence], [tokens[i : i + 1]])[0], score(model, [sequence], [tokens[i + 1 : i + 3]])[0]]
    sequence.close()
    return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Gemma"])
def test_a_cache_that_grows_in_the_middle_is_read_where_it_is(architecture: str, cache: Path) -> None:
    ordinary, quick = pair(architecture, "int8", max_position_embeddings=2 * MIN_CAPACITY)
    tokens = some_tokens(NEAR + 30, 1)
    seen: list[list[Any]] = []

    def note() -> None:
        seen.append(bounds(quick))

    wanted = after(ordinary, tokens, {}, NEAR)
    assert equal(after(quick, tokens, {NEAR + 3: note, NEAR + 27: note}, NEAR), wanted)
    assert quick._cache.capacity > MIN_CAPACITY
    assert all(seen)
    assert not {id(bound) for bound in seen[0]} & {id(bound) for bound in seen[1]}
    assert equal(after(quick, tokens[:3], {}), after(ordinary, tokens[:3], {}))


def test_rows_of_a_batch_are_read_where_they_are(cache: Path) -> None:
    ordinary, quick = pair("Llama", "int8")
    found = []
    for model in (ordinary, quick):
        rows = [model.open() for _ in range(4)]
        logits = score(model, rows, [some_tokens(5, i) for i in range(4)])
        rows[1].close()
        rows.pop(1)
        logits += score(model, rows, [some_tokens(2, i) for i in range(3)])
        logits += score(model, rows[:1], [some_tokens(2, 9)])
        logits += score(model, rows[:2], [some_tokens(2, 9)] * 2)
        found.append(logits)
    assert equal(*found)
    assert len(bounds(quick)) == 1  # of all slots, whichever are scored


def test_what_is_written_into_weights_shows_at_once(cache: Path) -> None:
    ordinary, quick = pair("Llama", "int8")
    tokens = some_tokens(9, 1)

    @torch.inference_mode()
    def change(model: TransformersModel) -> None:
        model.module.model.layers[1].input_layernorm.weight.mul_(3)
        model.module.lm_head.scales.mul_(2)

    plain = after(quick, tokens, {})
    wanted = after(ordinary, tokens, {6: lambda: change(ordinary)})
    assert equal(after(quick, tokens, {6: lambda: change(quick)}), wanted)
    assert not equal(wanted, plain)


@pytest.mark.parametrize("how", ["share_memory", "resized"])
def test_memory_that_moves_under_a_weight_is_followed(how: str, cache: Path) -> None:
    """As by whoever hands a model to another process, or shards it, in the middle of a sequence."""
    ordinary, quick = pair("Llama", "int8")
    tokens = some_tokens(9, 1)

    def move() -> None:
        for tensor in (*quick.module.parameters(), *quick.module.buffers()):
            if how == "share_memory":
                tensor.detach().share_memory_()
            else:
                storage, kept = tensor.untyped_storage(), tensor.detach().clone()
                storage.resize_(0)
                storage.resize_(kept.untyped_storage().nbytes())
                tensor.data.copy_(kept)
        rest.extend(torch.full((numel,), float("nan")) for numel in (8, 32, 48, 61, 32 * 48) for _ in range(40))

    rest: list[Tensor] = []  # whoever takes what was freed
    with torch.inference_mode():
        assert equal(after(quick, tokens, {3: move}), after(ordinary, tokens, {}))
    assert rest


def test_all_rows_read_the_same_weights_until_the_next_sequence(cache: Path) -> None:
    """Also in memory that is read for the first time after a weight was replaced."""
    _, quick = pair("Llama", "int8")
    rows = [quick.open() for _ in range(3)]
    tokens = some_tokens(5, 1)
    score(quick, rows, [tokens] * 3)
    alone = score(quick, rows[:1], [tokens[:2]])[0]
    norm = quick.module.model.norm
    norm.weight.data = norm.weight.detach() * 2
    for count in (2, 3, 1):
        for row in rows:
            row.truncate(5)
        assert all(torch.equal(each, alone) for each in score(quick, rows[:count], [tokens[:2]] * count))
    for row in rows:
        row.close()
    row = quick.open()
    score(quick, [row], [tokens])
    assert not torch.equal(score(quick, [row], [tokens[:2]])[0], alone)


@pytest.mark.slow
def test_a_view_of_the_first_layers_sees_replaced_weights_too(cache: Path) -> None:
    """A drafter that is used again: no sequence of its own is opened."""
    _, quick = pair("Llama", "int8", num_hidden_layers=3)
    drafter, fresh = EarlyExitDrafter(1), EarlyExitDrafter(1)

    def drafted(by: EarlyExitDrafter) -> list[list[int]]:
        found: list[list[int]] = []
        requests = [Request(some_tokens(5, 1), 12, RandomStream(0, 0))]
        greedy, extras = SamplingSettings(temperature=0.0), Extras(drafts=True)
        decoder = Decoder(quick, requests, greedy, by, FixedLength(3), extras)
        for batch in decoder.rounds():
            found += [list(record.drafts or ()) for _, record in batch]
        return found

    before = drafted(drafter)
    assert any(before)
    assert drafted(drafter) == before
    for layer in quick.module.model.layers:
        layer.input_layernorm.weight.data = -layer.input_layernorm.weight.detach()
    assert drafted(drafter) == drafted(fresh) != before


def test_sums_alone_are_no_chain(cache: Path) -> None:
    ours = kernels()
    assert ours is not None

    def function(x: Tensor) -> Tensor:
        y: Tensor = ours.ops.silu(x)
        return y + (x + y + x)

    x = torch.randn(1, 3, 8)
    graph = make_fx(function)(x)
    fuse(graph)
    graph.recompile()
    assert "chain" not in graph.code
    assert torch.equal(graph(x), function(x))


@pytest.mark.parametrize(("part", "by_data"), thinned(["norm", "scales", "weight"], [False, True]))
def test_other_memory_for_a_weight_shows_in_the_next_sequence(part: str, by_data: bool, cache: Path) -> None:
    """And until then what was there before is kept: its addresses are in use."""
    ordinary, quick = pair("Llama", "int8")
    tokens = some_tokens(9, 1)

    def change(model: TransformersModel) -> None:
        head = model.module.lm_head
        owner, name = {
            "norm": (model.module.model.norm, "weight"),
            "scales": (head, "scales"),
            "weight": (head, "_packed"),
        }[part]
        old: Tensor = getattr(owner, name)
        new = old.flip(0).clone() if part == "weight" else old.detach() * 2
        if by_data:
            old.data = new
        elif isinstance(old, torch.nn.Parameter):
            setattr(owner, name, torch.nn.Parameter(new, requires_grad=False))
        else:
            setattr(owner, name, new)
        del old
        gc.collect()
        torch.full((4096,), float("nan"))  # whoever takes what was freed

    before = after(ordinary, tokens, {})
    assert equal(after(quick, tokens, {6: lambda: change(quick)}), before)
    assert quick.recorded is not None
    change(ordinary)
    wanted = after(ordinary, tokens, {})
    assert not equal(wanted, before)
    assert equal(after(quick, tokens, {}), wanted)
    assert quick.recorded is not None


def test_few_things_are_handed_over_in_a_pass(cache: Path) -> None:
    """As many whatever the number of layers: tables and what positions are made of, and a plan."""
    counts = []
    for layers in (2, 5):
        model = made("Llama", "int8", num_hidden_layers=layers)
        record_now(model)
        score(model, [model.open()], [[5, 6]])
        (bound,) = bounds(model)
        counts.append(len(bound.rest))
        assert len(bound.held) > 9 * layers
    assert counts[0] == counts[1] < 6


def used_once() -> weakref.ref[Tensor]:
    model = made("Llama", "int8")
    record_now(model)
    sequences = [model.open(), model.open()]
    score(model, sequences, [[5], [6]])
    score(model, sequences[:1], [[5]])
    assert bounds(model)
    for sequence in sequences:
        sequence.close()
    return weakref.ref(model.module.lm_head._packed)


def test_a_model_with_plans_is_freed_at_once(cache: Path) -> None:
    used_once()
    gc.collect()
    gc.disable()
    try:
        assert used_once()() is None
    finally:
        gc.enable()


def test_a_graph_without_plans_is_given_what_it_reads() -> None:
    text = """graph(%i0 : int, %i1 : Any, %i2 : Tensor, %i3 : Tensor, %i4 : Tensor, %i5 : Any):
  %c0 : int = prim::Constant[value=1]()
  %v0 : Tensor = aten::add(%i2, %i4, %c0)
  %v1 : Tensor[] = prim::ListConstruct(%v0)
  return (%v1)
"""
    graph = PlannedGraph(text)
    assert not graph.has_plans
    for read, about in (([torch.ones(2), None], 2), ([torch.ones(2), torch.ones(2), None], 1)):
        bound = graph.bind([], read)
        given = [torch.full((2,), 3.0), torch.ones(2)][:about]
        assert torch.equal(graph.run(bound, 1, 2, given)[0], torch.full((2,), 4.0))
        assert (bound.leading, len(bound.rest)) == ((2,), 1)
