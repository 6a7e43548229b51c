"""Operations of ours that are several in one: the bits of these; what in a traced pass becomes one, and what does not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.models import recording
from outrider.models.kernels.build import Kernels, build, kernels
from outrider.models.kernels.fusing import fuse
from outrider.models.kernels.linear import Int4Kernel, Int8Kernel
from outrider.models.pass_graph import trace_pass
from outrider.models.rounded import round_to_int8
from outrider.models.transformers_model import TransformersModel
from tests.test_kernels import HERE, rows_of
from tests.tiny_models import module, record_now

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


@pytest.fixture(params=HERE)
def built(request: pytest.FixtureRequest) -> Kernels:
    return build(request.param)


def fused(layer: Int8Kernel | Int4Kernel, x: Tensor, ours: Kernels, around: tuple[Any, ...]) -> Tensor:
    """around: norm, eps, more, gated, added"""
    if isinstance(layer, Int8Kernel):
        weight: tuple[Any, ...] = (layer._packed, layer.get_buffer("scales"))
        out: Tensor = ours.ops.fused_int8(x, *around, *weight, layer.bias, layer.out_features)
    else:
        out = ours.ops.fused_int4(x, *around, layer._packed, layer.bias, layer.out_features)
    return out


@pytest.mark.parametrize("kind", [Int8Kernel, Int4Kernel])
@pytest.mark.parametrize("before", ["nothing", "norm", "gate"])
@pytest.mark.parametrize("size", [(1, 1), (33, 31), (300, 500)])
def test_a_layer_has_the_bits_of_its_operations(
    built: Kernels, kind: type[Int8Kernel | Int4Kernel], before: str, size: tuple[int, int]
) -> None:
    draw = torch.Generator().manual_seed(3)
    outputs, columns = size
    x = rows_of(columns * 2 if before == "gate" else columns)
    norm = torch.randn(columns, generator=draw)
    for bias in (None, torch.randn(outputs, generator=draw)):
        layer = kind(torch.randn(size, generator=draw), bias, built)
        for added in (None, torch.randn(2, 13, outputs, generator=draw), torch.randn(13, 2, outputs).transpose(0, 1)):
            with torch.inference_mode():
                if before == "norm":
                    want = layer(built.ops.rms_norm(x, norm, 1e-5, 1.0))
                elif before == "gate":
                    want = layer(built.ops.silu(x[..., :columns]) * x[..., columns:])
                else:
                    want = layer(x)
                want = want if added is None else added + want
                around = (norm if before == "norm" else None, 1e-5, 1.0, before == "gate")
                assert torch.equal(fused(layer, x, built, (*around, added)), want)
                one = None if added is None else added[1:, 4:5]
                assert torch.equal(fused(layer, x[1:, 4:5], built, (*around, one)), want[1:, 4:5])


def test_a_gate_is_shared_by_threads_without_another_bit(built: Kernels) -> None:
    layer = Int4Kernel(torch.randn(20, 9000), None, built)
    x, before = torch.randn(1, 3, 18000), torch.get_num_threads()
    try:
        with torch.inference_mode():
            want = layer(built.ops.silu(x[..., :9000]) * x[..., 9000:])
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(fused(layer, x, built, (None, 0.0, 0.0, True, None)), want)
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_a_layer_is_refused(built: Kernels) -> None:
    layer = Int8Kernel(torch.randn(6, 80), None, built)
    x = torch.randn(2, 80)
    for wrong in (
        (torch.ones(79), 1e-5, 0.0, False, None),
        (torch.ones(80).double(), 1e-5, 0.0, False, None),
        (torch.ones(80), 1e-5, 0.0, True, None),
        (None, 0.0, 0.0, True, None),  # a gate and what it is for would have 40 columns each
        (None, 0.0, 0.0, False, torch.randn(2, 5)),
        (None, 0.0, 0.0, False, torch.randn(2, 6).double()),
    ):
        with pytest.raises(RuntimeError):
            fused(layer, x, built, wrong)


def test_silu_is_that_function_and_a_numbers_bits_are_its_own(built: Kernels) -> None:
    x = torch.cat([torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30, torch.inf, -torch.inf, torch.nan])])
    with torch.inference_mode():
        got, want = built.ops.silu(x), torch.nn.functional.silu(x.double())
        usual = want.isfinite() & (want.abs() > 1e-30)
        torch.testing.assert_close(got[usual].double(), want[usual], rtol=5e-7, atol=0)
        assert torch.equal(got.isnan(), want.isnan())
        assert got[-3] == torch.inf
        assert float(got[(x < -80) & (x > -torch.inf)].abs().max()) < 1e-30
        for count in (1, 7, 8, 9, 30):
            assert torch.equal(built.ops.silu(x[1990 : 1990 + count]), got[1990 : 1990 + count])
        assert torch.equal(built.ops.silu(x[:4000].view(2, 40, 50)[..., 3:20]), got[:4000].view(2, 40, 50)[..., 3:20])


SHAPES = [(9, 3, 64, 64), (4, 4, 24, 24), (6, 2, 80, 32), (2, 1, 8, 6)]  # heads, heads of keys, size, how much is rotated


def drawn(shape: tuple[int, int, int, int], rows: int, tokens: int) -> tuple[Tensor, ...]:
    """packed, cos, sin, keys, values, at, seen"""
    heads, groups, size, turned = shape
    draw = torch.Generator().manual_seed(1)
    packed = torch.randn(rows, tokens, (heads + 2 * groups) * size, generator=draw)
    cos, sin = (torch.randn(rows, 1, tokens, turned, generator=draw) for _ in range(2))
    keys, values = (torch.randn(rows + 1, groups, 300, size, generator=draw)[1:] for _ in range(2))
    at = torch.stack([torch.randperm(280, generator=draw)[:tokens] for _ in range(rows)])
    seen = torch.rand(rows, 1, tokens, 280, generator=draw) < 0.5
    return packed, cos, sin, keys, values, at, seen


def one_by_one(ours: Kernels, heads: int, norms: list[Tensor | None], given: tuple[Tensor, ...]) -> Tensor:
    """The same by operations of their own, keys and values kept in place."""
    packed, cos, sin, keys, values, at, seen = given
    rows, tokens = packed.shape[:2]
    groups, size, turned = keys.shape[1], keys.shape[3], cos.shape[3]
    query, key, value = torch.split(packed, [heads * size, groups * size, groups * size], -1)
    parts = []
    for part, norm in zip((query, key), norms, strict=True):
        x = part.view(rows, tokens, -1, size)
        x = x if norm is None else ours.ops.rms_norm(x, norm, 1e-6, 0.5)
        x = x.transpose(1, 2)
        parts.append(torch.cat([ours.ops.rotate(x[..., :turned], cos, sin), x[..., turned:]], -1))
    each = torch.arange(rows).unsqueeze(-1)
    keys[each, :, at] = parts[1].transpose(1, 2)
    values[each, :, at] = value.view(rows, tokens, groups, size)
    out: Tensor = ours.ops.attend(parts[0], keys[:, :, :280], values[:, :, :280], seen, 0.2)
    return out.flatten(2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 5), (3, 4)])
@pytest.mark.parametrize("normed", [(False, False), (True, True), (False, True)])
def test_attention_of_new_tokens_has_the_bits_of_its_operations(
    built: Kernels, shape: tuple[int, int, int, int], rows: int, tokens: int, normed: tuple[bool, bool]
) -> None:
    heads, _, size, _ = shape
    norms = [torch.randn(size) if one else None for one in normed]
    given, twin = drawn(shape, rows, tokens), drawn(shape, rows, tokens)
    packed, cos, sin, keys, values, at, seen = given
    with torch.inference_mode():
        want = one_by_one(built, heads, norms, twin)
        arguments = (*norms, 1e-6, 0.5, cos, sin, keys, values, at, seen, 280, 0.2)
        assert torch.equal(built.ops.attend_new(packed, heads, *arguments), want)
    assert torch.equal(keys, twin[3])
    assert torch.equal(values, twin[4])


def test_what_does_not_fit_an_attention_is_refused(built: Kernels) -> None:
    packed, cos, sin, keys, values, at, seen = drawn((4, 2, 16, 16), 2, 3)
    right = [packed, 4, None, None, 0.0, 0.0, cos, sin, keys, values, at, seen, 280, 0.2]
    built.ops.attend_new(*right)
    kept = keys.clone(), values.clone()
    wrong: list[tuple[int, Any]] = [
        (0, packed[..., :-1]),
        (0, packed.double()),
        (1, 3),
        (2, torch.ones(15)),
        (6, cos[..., :-1]),
        (7, sin[:, :, :2]),
        (8, keys[:1]),
        (9, values[..., :8]),
        (10, at[:, :2]),
        (10, at.int()),
        (10, torch.full_like(at, 300)),
        (10, torch.full_like(at, -1)),
        (11, seen[..., :-1]),
        (11, seen.float()),
        (12, 301),
    ]
    for place, value in wrong:
        with pytest.raises(RuntimeError):
            built.ops.attend_new(*right[:place], value, *right[place + 1 :])
    assert torch.equal(keys, kept[0])
    assert torch.equal(values[:, :, 280:], kept[1][:, :, 280:])


def calls(graph: GraphModule) -> Counter[str]:
    return Counter(node.target.__name__ for node in graph.graph.nodes if node.op == "call_function")


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def test_sums_that_only_look_like_a_rotation_are_no_error() -> None:
    ours = kernels()
    assert ours is not None
    weight = torch.ones(8)

    def normed(x: Tensor) -> Tensor:
        out: Tensor = ours.ops.rms_norm(x, weight, 1e-5, 0.0)
        return out

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


@pytest.mark.parametrize("failing", ["raises", "refused by the operation", "other bits"])
def test_what_cannot_be_fused_is_recorded_apart(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def fuse_wrongly(graph: GraphModule) -> None:
        fuse(graph)
        if failing == "raises":
            raise KeyError("val")
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "fused_int8.default" and node.args[1] is not None:
                values: dict[str, tuple[int, Any]] = {"refused by the operation": (4, True), "other bits": (3, 0.5)}
                node.update_arg(*values[failing])

    monkeypatch.setattr(recording, "fuse", fuse_wrongly)
    made = module("Llama", dtype=torch.float32)
    round_to_int8(made)
    model = TransformersModel(made, name="rounded")
    with caplog.at_level(logging.DEBUG, logger="outrider.models.recording"):
        record_now(model)
    assert model.recorded is not None
    (text,) = [path.read_text() for path in (tmp_path / "recorded").glob("*.txt")]
    assert "fused" not in text
    assert "linear_int8" in text
    assert "its operations stay apart" in caplog.text


def test_only_such_operations_become_a_rotation() -> None:
    ours = kernels()
    assert ours is not None
    weight = torch.ones(8)

    def normed(x: Tensor) -> Tensor:
        out: Tensor = ours.ops.rms_norm(x, weight, 1e-5, 0.0)
        return out

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
            fuse(graph)
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
        fuse(graph)
        graph.recompile()
        found = calls(graph)
        assert (found["transpose.int"], found["unsqueeze.default"], found["slice.Tensor"]) == (2, 2, 2)
        assert not found["alias.default"] + found["clone.default"] + found["split.Tensor"] + found["getitem"]
        assert torch.equal(graph(x), function(x))


def test_only_such_operations_become_part_of_a_layer() -> None:
    ours = kernels()
    assert ours is not None
    weight, other = torch.ones(8), Int8Kernel(torch.randn(8, 8), None, ours)
    layer = Int4Kernel(torch.randn(8, 8), torch.randn(8), ours)

    def normed(x: Tensor) -> Tensor:
        out: Tensor = ours.ops.rms_norm(x, weight, 1e-5, 0.0)
        return out

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
            fuse(graph)
            graph.recompile()
            found = calls(graph)
            assert found["fused_int4.default"] + found["fused_int8.default"] == count, i
            assert {name: found[name] for name in norm | past | gate if found[name]} == stays, i
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
        fuse(graph)
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
        keys.index_copy_(2, at[0], key)
        values.index_copy_(2, at[0] if self.change != "other columns" else at[0] + 1, value)
        held = keys[:, :, :16], values[:, :, :16]
        if self.change == "fewer values":
            held = held[0], values[:, :, 1:17]
        out = self.ours.ops.attend(query, *held, seen, 0.3)
        flat = out.reshape(1, 3, -1) if self.change != "heads apart" else out.transpose(1, 2).reshape(1, self.heads, -1)
        return (flat, held[0].sum()) if self.change == "keys are read again" else flat


@pytest.mark.parametrize(
    ("change", "found"),
    [("", True), ("norms", True)]
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
        )
    ],
)
def test_only_such_operations_become_an_attention_of_new_tokens(change: str, found: bool) -> None:
    ours = kernels()
    assert ours is not None
    kept = KeptPass(ours, change)
    with torch.no_grad():
        graph = make_fx(kept)(*kept.given())
        fuse(graph)
        graph.recompile()
        assert calls(graph)["attend_new.default"] == found
        assert calls(graph)["index_copy_.default"] == (0 if found else 2)
        given, twin = kept.given(), kept.given()
        got, want = graph(*given), kept(*twin)
    results = [(*(out if isinstance(out, tuple) else (out,)), *left) for out, left in ((got, given), (want, twin))]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("architecture", "several"),
    [("Llama", False), ("Llama", True), ("Qwen2", False), ("Qwen3", True), ("Mistral", False), ("Phi3", True)],
)
def test_five_operations_are_left_of_a_layer(architecture: str, several: bool) -> None:
    made = module(architecture, dtype=torch.float32)
    round_to_int8(made)
    graph = trace_pass(TransformersModel(made, name="rounded"), None, (), several).graph
    fuse(graph)
    found, layers = calls(graph), made.config.num_hidden_layers
    assert (found["fused_int8.default"], found["attend_new.default"]) == (4 * layers, layers)
    apart = ("add", "silu", "index_copy_", "index_put_", "transpose", "rotate", "attend")
    assert not [name for name in found if name.split(".")[0] in apart]
