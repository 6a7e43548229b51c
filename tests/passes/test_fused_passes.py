"""What in a traced pass becomes one operation of ours, and what does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.kernels.models import Kernels, kernels
from outrider.models.kernels.fusing import fuse, fuse_operations
from outrider.models.passes import recording
from outrider.models.passes.graph import trace_pass
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.kernel_linear import Int4Kernel, Int8Kernel
from outrider.models.weights.quantized import quantize_to_int8
from tests.helpers.chains import calls
from tests.helpers.kernels import turned
from tests.helpers.marks import slow
from tests.helpers.tiny_models import module, record_now

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")
NORM = torch.ones(8)


def normed(x: Tensor) -> Tensor:
    """By an operation of ours: passes without one are left alone."""
    ours = kernels()
    assert ours is not None
    out: Tensor = ours.ops.rms_norm(x, NORM, 1e-5, 0.0)
    return out


def test_sums_that_only_look_like_a_rotation_are_no_error() -> None:
    angles = torch.randn(1, 1, 3, 8)
    for function in (
        lambda x: (y := normed(x)) + turned(y) * angles,
        lambda x: (y := normed(x)) * 2.0 + turned(y) * angles,
        lambda x: (y := normed(x)) * angles + turned(y) * 2.0,
        lambda x: (y := normed(x)) * angles[:, :, :1] + turned(y) * angles[:, :, :1],
        lambda x: (y := normed(x)[:1]) * angles.expand(2, -1, -1, -1) + turned(y) * angles.expand(2, -1, -1, -1),
        lambda x: normed(x) * x.sum() + torch.cat([-x[..., 4:], x[..., :4]], -1) * x.sum(),
    ):
        x = torch.randn(2, 2, 3, 8)
        with torch.no_grad():
            graph = make_fx(function)(x)
            fuse(graph)
            graph.recompile()
            assert not calls(graph)["rotate.default"]
            assert torch.equal(graph(x), function(x))


@pytest.mark.parametrize("failing", ["raises", slow("refused by the operation"), "other bits", slow("all of it")])
def test_what_cannot_be_fused_is_recorded_apart(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def fuse_wrongly(graph: GraphModule) -> None:
        fuse(graph)
        if failing in ("raises", "all of it"):
            raise KeyError("val")
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "chain.default":
                other: list[float] = [number + 0.5 for number in node.args[3]]
                values: dict[str, tuple[int, Any]] = {"refused by the operation": (5, 0), "other bits": (3, other)}
                node.update_arg(*values[failing])

    monkeypatch.setattr(recording, "fuse", fuse_wrongly)
    if failing == "all of it":
        monkeypatch.setattr(recording, "fuse_operations", fuse_wrongly)
    made = module("Llama", dtype=torch.float32)
    quantize_to_int8(made)
    model = TransformersModel(made, name="quantized")
    with caplog.at_level(logging.DEBUG, logger="outrider.models.passes.recording"):
        record_now(model)
    assert model.recorded is not None
    (text,) = [path.read_text() for path in (tmp_path / "recorded").glob("*.txt")]
    assert "chain" not in text
    assert ("fused" in text, "linear_int8" in text) == ((False, True) if failing == "all of it" else (True, False))
    assert "its operations stay apart" in caplog.text


def test_only_such_operations_become_a_rotation() -> None:
    cases: list[tuple[Callable[[Tensor, Tensor, Tensor], Tensor], int]] = [
        (lambda x, cos, sin: normed(x) * cos + turned(normed(x)) * sin, 0),  # two different results
        (lambda x, cos, sin: (y := normed(x)) * cos + turned(y) * sin, 1),
        (lambda x, cos, sin: turned(y := normed(x)) * sin + y * cos, 1),
        (lambda x, cos, sin: x * cos + turned(x) * sin, 0),  # a model without our kernels
        (lambda x, cos, sin: (y := normed(x)) * cos + turned(y) * sin.expand(1, 2, 3, 8), 0),
        (lambda x, cos, sin: (y := normed(x)) * cos - turned(y) * sin, 0),
        (lambda x, cos, sin: (y := normed(x)) * cos + torch.cat([y[..., 4:], -y[..., :4]], -1) * sin, 0),
        (lambda x, cos, sin: (y := normed(x)) * cos + torch.cat([-y[..., 3:], y[..., :3]], -1) * sin, 0),
    ]
    x, cos, sin = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)
    for function, count in cases:
        with torch.no_grad():
            graph = make_fx(function)(x, cos, sin)
            fuse_operations(graph)
            graph.recompile()
            assert calls(graph)["rotate.default"] == count
            assert torch.equal(graph(x, cos, sin), function(x, cos, sin))


def test_what_computes_nothing_is_left_out() -> None:
    ours = kernels()
    assert ours is not None
    layer = Int8Kernel(torch.randn(8, 8), None, ours)

    def function(x: Tensor) -> Tensor:
        z: Tensor = layer(torch.ops.aten.alias.default(x.transpose(1, 2).transpose(1, 2)))
        first, second = z.clone().chunk(2, -1)
        return first.unsqueeze(1) * second.unsqueeze(1) + first.unsqueeze(1).transpose(1, 2).transpose(2, 3)

    x = torch.randn(1, 4, 8)
    with torch.no_grad():
        graph = make_fx(function)(x)
        fuse_operations(graph)
        graph.recompile()
        found = calls(graph)
        assert (found["transpose.int"], found["unsqueeze.default"], found["slice.Tensor"]) == (2, 2, 2)
        assert not found["alias.default"] + found["clone.default"] + found["split.Tensor"] + found["getitem"]
        assert torch.equal(graph(x), function(x))


def test_only_such_operations_become_part_of_a_layer() -> None:
    ours = kernels()
    assert ours is not None
    other = Int8Kernel(torch.randn(8, 8), None, ours)
    layer = Int4Kernel(torch.randn(8, 8), torch.randn(8), ours)

    def silu(x: Tensor) -> Tensor:
        out: Tensor = ours.ops.silu(x)
        return out

    whole: dict[str, int] = {}
    norm, past, gate = {"rms_norm.default": 1}, {"add.Tensor": 1}, {"silu.default": 1, "mul.Tensor": 1}
    cases: list[tuple[Callable[[Tensor, Tensor], Any], int, dict[str, int]]] = [  # fused layers, what stays by itself
        (lambda x, y: y + layer(normed(x)), 1, whole),
        (lambda x, y: layer(normed(x)) + y, 1, whole),
        (lambda x, y: other(normed(layer(normed(x)) + y)), 2, whole),
        (lambda x, y: layer(silu(torch.cat([x, y], -1)[..., :8]) * y), 0, gate),  # of two results
        (lambda x, y: layer(silu((z := torch.cat([x, y], -1))[..., :8]) * z[..., 8:]), 1, whole),
        (lambda x, y: layer((z := torch.cat([x, y], -1))[..., 8:] * silu(z[..., :8])), 1, whole),
        (lambda x, y: layer((z := torch.cat([x, y], -1))[..., :8] * silu(z[..., 8:])), 0, gate),  # the gate behind
        (lambda x, y: layer(silu((z := torch.cat([x, y, y], -1))[..., :8]) * z[..., 8:16]), 0, gate),  # not all of it
        (lambda x, y: (n := normed(x), layer(n) + y)[1] + n, 1, norm | past),  # two read the norm
        (lambda x, y: (z := layer(normed(x))) + y + z, 1, {"add.Tensor": 2}),  # two read the result
        (lambda x, y: layer(normed(x)) + y[:, :1], 1, past),  # broadcast
        (lambda x, y: torch.add(y, layer(normed(x)), alpha=2), 1, past),
        (lambda x, y: (z := layer(normed(x))) + z, 1, past),
        (lambda x, y: layer(normed(x)) + other(y), 1, whole),  # one is added to the other
        (lambda x, y: layer(normed(x).chunk(2, 1)[1]) + y[:, :2], 1, norm),
    ]
    x, y = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    for i, (function, count, stays) in enumerate(cases):
        with torch.no_grad():
            graph = make_fx(function)(x, y)
            fuse_operations(graph)
            graph.recompile()
            found = calls(graph)
            assert found["fused_grouped.default"] + found["fused_int8.default"] == count, i
            assert {name: found[name] for name in norm | past | gate if found[name]} == stays, i
            assert torch.equal(graph(x, y), function(x, y)), i
            fuse(graph)
            graph.recompile()
            assert not calls(graph)["fused_grouped.default"] + calls(graph)["fused_int8.default"] or count < 2, i
            assert torch.equal(graph(x, y), function(x, y)), i


@pytest.mark.parametrize("into", ["what is read before", "a part of it", "a copy"])
def test_a_pass_that_writes_into_what_is_read_elsewhere_stays_as_it_is(into: str) -> None:
    """What is read later would be something else."""
    ours = kernels()
    assert ours is not None
    layer = Int8Kernel(torch.randn(8, 8), None, ours)

    def function(x: Tensor) -> Tensor:
        h = x * 3
        made: Tensor = layer(ours.ops.rms_norm(h, torch.ones(8), 1e-5, 0.0))
        written = {"what is read before": h, "a part of it": h[:, 1:], "a copy": h * 1}[into]
        written.clamp_(-1.0, 1.0)
        return h + made

    x = torch.randn(1, 4, 8)
    with torch.no_grad():
        graph = make_fx(function)(x)
        fuse_operations(graph)
        graph.recompile()
        assert calls(graph)["fused_int8.default"] == (into == "a copy")
        assert torch.equal(graph(x), function(x))


class KeptPass:
    """Attention of new tokens as `tracing` and transformers write it, and what may be different about it."""

    heads, groups, size = 4, 2, 8

    def __init__(self, ours: Kernels, change: str = "") -> None:
        self.ours, self.change = ours, change
        draw = torch.Generator().manual_seed(0)
        width = (self.heads + 2 * self.groups) * self.size
        self.layer = Int8Kernel(torch.randn(width, 12, generator=draw), None, ours)
        self.norm = torch.rand(self.size, generator=draw) + 0.5

    def given(self) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(1, 3, 12, generator=draw)
        cos, sin = (torch.randn(1, 1, 3, self.size, generator=draw) for _ in range(2))
        keys, values = (torch.randn(1, self.groups, 20, self.size, generator=draw) for _ in range(2))
        if self.change.startswith("kept in float16"):
            keys, values = keys.half(), values.half()
        return x, cos, sin, keys, values, torch.tensor([[4, 5, 6]]), torch.rand(1, 1, 3, 16, generator=draw) < 0.7

    def __call__(self, *given: Tensor) -> Any:
        x, cos, sin, keys, values, at, seen = given
        packed = self.layer(x)
        ends = [self.heads * self.size, (self.heads + self.groups) * self.size]
        order = [packed[..., : ends[0]], packed[..., ends[0] : ends[1]], packed[..., ends[1] :]]
        if self.change == "values before keys":
            order[1], order[2] = order[2], order[1]
        if self.change == "keys of another layer":
            order[1] = self.layer(x * 2)[..., ends[0] : ends[1]]
        query, key, value = (part.view(1, 3, -1, self.size).transpose(1, 2) for part in order)
        if self.change in ("norms", "norms of other kinds"):
            query = self.ours.ops.rms_norm(query, self.norm, 1e-6, 0.0)
            key = self.ours.ops.rms_norm(key, self.norm, 1e-6, 1.0 if self.change == "norms of other kinds" else 0.0)
        query = query * cos + turned(query) * sin
        key = key * cos + turned(key) * sin if self.change != "other angles" else key * sin + turned(key) * cos
        if self.change == "kept in float16, quantized before":
            key = key.half().float()
        keys.index_copy_(2, at[0], key.to(keys.dtype))
        values.index_copy_(2, at[0] if self.change != "other columns" else at[0] + 1, value.to(values.dtype))
        held = keys[:, :, :16], values[:, :, :16]
        if self.change == "kept in float16, read in float32":
            held = held[0].float(), held[1].float()
        if self.change == "fewer values":
            held = held[0], values[:, :, 1:17]
        out = self.ours.ops.attend(query, *held, seen, 0.3)
        flat = out.reshape(1, 3, -1) if self.change != "heads apart" else out.transpose(1, 2).reshape(1, self.heads, -1)
        return (flat, held[0].sum()) if self.change == "keys are read again" else flat


@pytest.mark.parametrize(
    ("change", "found"),
    [("", True), ("norms", True), ("kept in float16", True)]
    + [
        (change, False)
        for change in (
            "values before keys",
            "keys of another layer",
            "norms of other kinds",
            "other angles",
            "other columns",
            "fewer values",
            "heads apart",
            "keys are read again",
            "kept in float16, quantized before",
            "kept in float16, read in float32",
        )
    ],
)
def test_only_such_operations_become_an_attention_of_new_tokens(change: str, found: bool) -> None:
    ours = kernels()
    assert ours is not None
    kept = KeptPass(ours, change)
    with torch.no_grad():
        graph = make_fx(kept)(*kept.given())
        fuse_operations(graph)
        graph.recompile()
        assert calls(graph)["attend_new.default"] == found
        assert calls(graph)["index_copy_.default"] == (0 if found else 2)
        fuse(graph)
        graph.recompile()
        assert calls(graph)["chain.default"] == (found or change == "keys of another layer")  # of two linear layers
        given, twin = kept.given(), kept.given()
        got, want = graph(*given), kept(*twin)
    results = [(*(out if isinstance(out, tuple) else (out,)), *left) for out, left in ((got, given), (want, twin))]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("architecture", "several"),
    [("Llama", False), ("Llama", True), slow("Qwen2", False), ("Qwen3", True), slow("Mistral", False), ("Phi3", True)],
)
def test_five_operations_are_left_of_a_layer_and_one_of_a_pass(architecture: str, several: bool) -> None:
    made = module(architecture, dtype=torch.float32)
    quantize_to_int8(made)
    graph = trace_pass(TransformersModel(made, name="quantized"), None, (), several).graph
    fuse_operations(graph)
    found, layers = calls(graph), made.config.num_hidden_layers
    assert (found["fused_int8.default"], found["attend_new.default"]) == (4 * layers + 1, layers)  # and the head
    apart = ("add", "silu", "index_copy_", "index_put_", "transpose", "rotate", "attend")
    assert not [name for name in found if name.split(".")[0] in apart]
    fuse(graph)
    assert calls(graph) == {"chain_plan.default": 1, "chain.default": 1, "getitem": 1}  # from tokens to logits


@pytest.mark.parametrize("several", [slow(False), True])
@pytest.mark.parametrize(
    ("architecture", "chains"), [("Gemma", 3), slow("Gemma2", 4), ("GPTNeoX", 4), slow("Phi", 4), ("Granite", 5)]
)
def test_models_with_other_operations_between_have_several_chains(architecture: str, chains: int, several: bool) -> None:
    """A later one reads what an earlier one made."""
    made = module(architecture, dtype=torch.float32)
    quantize_to_int8(made)
    graph = trace_pass(TransformersModel(made, name="quantized"), None, (), several).graph
    fuse(graph)
    graph.graph.lint()
    assert calls(graph)["chain.default"] == chains
