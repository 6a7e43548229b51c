"""Operations of ours that are several in one: the bits of these, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kernels.models import Kernels, kernels
from outrider.models.kernels.rows import GELUS
from outrider.models.weights.kernel_linear import Int4Kernel, Int8Kernel
from tests.helpers.kernels import rows_of

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


def fused(layer: Int8Kernel | Int4Kernel, x: Tensor, ours: Kernels, around: tuple[Any, ...]) -> Tensor:
    """around: norm, eps, more, gated, added"""
    if isinstance(layer, Int8Kernel):
        weight: tuple[Any, ...] = (layer._packed, layer.get_buffer("scales"))
        out: Tensor = ours.ops.fused_int8(x, *around, *weight, layer.bias, layer.out_features)
    else:
        out = ours.ops.fused_grouped(x, *around, layer._packed, layer.bias, layer.out_features)
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


def by_the_tail(x: Tensor) -> Tensor:
    """GELU as it is defined; torch's 1 + erf(x) has no digits left far below 0."""
    below: Tensor = torch.special.erfc(-x / 2**0.5)
    return x * below / 2


def by_a_sigmoid(x: Tensor) -> Tensor:
    """The same approximation as with tanh, and the same of it."""
    return x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


@pytest.mark.parametrize(
    ("name", "wanted", "tolerance"),
    [
        ("silu", torch.nn.functional.silu, 5e-7),
        ("gelu 0", by_the_tail, 5e-6),  # e^(-x^2 / 2) of a rounded x^2
        ("gelu 1", by_a_sigmoid, 1e-5),
        ("gelu 2", GELUS[2], 1e-5),
    ],
)
def test_an_activation_is_that_function_and_a_numbers_bits_are_its_own(
    built: Kernels, name: str, wanted: Callable[[Tensor], Tensor], tolerance: float
) -> None:
    def ours(x: Tensor) -> Tensor:
        operation, *form = name.split()
        out: Tensor = getattr(built.ops, operation)(x, *map(int, form))
        return out

    few, many = torch.linspace(-100, 100, 4001), torch.linspace(-6, 6, 5001)
    x = torch.cat([few, many, torch.tensor([0.0, -0.0, 1e-30, torch.inf, -torch.inf, torch.nan])])
    with torch.inference_mode():
        got, want = ours(x), wanted(x.double())
        usual = want.isfinite() & (want.abs() > 1e-30)
        torch.testing.assert_close(got[usual].double(), want[usual], rtol=tolerance, atol=0)
        near = usual & (x > -2)
        torch.testing.assert_close(got[near].double(), want[near], rtol=1e-6, atol=0)
        assert got[-1].isnan()
        assert not got[:-2].isnan().any()
        assert got[-3] == torch.inf
        assert float(got[(x < -80) & (x > -torch.inf)].abs().max()) < 1e-30
        for count in (1, 7, 8, 9, 30):
            assert torch.equal(ours(x[1990 : 1990 + count]), got[1990 : 1990 + count])
        assert torch.equal(ours(x[:4000].view(2, 40, 50)[..., 3:20]), got[:4000].view(2, 40, 50)[..., 3:20])


def test_there_are_three_forms_of_gelu(built: Kernels) -> None:
    for form in (-1, 3):
        with pytest.raises(RuntimeError, match="no such form"):
            built.ops.gelu(torch.ones(3), form)


SHAPES = [(9, 3, 64, 64), (4, 4, 24, 24), (6, 2, 80, 32), (2, 1, 8, 6)]  # heads, heads of keys, size, how much is rotated


def drawn(shape: tuple[int, int, int, int], rows: int, tokens: int, kept: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """packed, cos, sin, keys, values, at, seen"""
    heads, groups, size, turned = shape
    draw = torch.Generator().manual_seed(1)
    packed = torch.randn(rows, tokens, (heads + 2 * groups) * size, generator=draw)
    cos, sin = (torch.randn(rows, 1, tokens, turned, generator=draw) for _ in range(2))
    keys, values = (torch.randn(rows + 1, groups, 300, size, generator=draw)[1:].to(kept) for _ in range(2))
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
    keys[each, :, at] = parts[1].transpose(1, 2).to(keys.dtype)
    values[each, :, at] = value.view(rows, tokens, groups, size).to(keys.dtype)
    out: Tensor = ours.ops.attend(parts[0], keys[:, :, :280], values[:, :, :280], seen, 0.2)
    return out.flatten(2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 5), (3, 4)])
@pytest.mark.parametrize("normed", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("kept", [torch.float32, torch.float16])
def test_attention_of_new_tokens_has_the_bits_of_its_operations(
    built: Kernels, shape: tuple[int, int, int, int], rows: int, tokens: int, normed: tuple[bool, bool], kept: torch.dtype
) -> None:
    heads, _, size, _ = shape
    norms = [torch.randn(size) if one else None for one in normed]
    given, twin = drawn(shape, rows, tokens, kept), drawn(shape, rows, tokens, kept)
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
        (8, keys.half()),
        (9, values.double()),
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
    with pytest.raises(
        RuntimeError, match="kept in other sizes"
    ):  # one row, beside the keys of two: whose it is nobody said
        built.ops.attend_new(packed[:1], *right[1:6], cos[:1], sin[:1], keys, values, at[:1], seen[:1], *right[12:])
    assert torch.equal(keys, kept[0])
    assert torch.equal(values[:, :, 280:], kept[1][:, :, 280:])
