"""What a chain begins with: tokens looked up in a table, norms beside each other, angles and masks of positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.kernels.models import Kernels, kernels
from outrider.models.kernels.fusing import fuse
from outrider.models.kernels.fusing.chains import ATTENTION, PLACED
from outrider.models.weights.kernel_linear import Int8Kernel
from tests.helpers.chains import WIDTH, calls, kept_of, layers, of_here

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


def before_cases() -> list[tuple[str, Callable[..., Tensor], dict[str, int]]]:
    """What is computed of tokens and positions before a layer, and what is left beside one chain."""
    ours = of_here()
    one, _, normed = layers(ours)
    draw = torch.Generator().manual_seed(8)
    rows = torch.randint(-127, 128, (9, WIDTH), generator=draw, dtype=torch.int8)
    scales, table = torch.rand(9, 1, generator=draw), torch.randn(9, WIDTH, generator=draw)
    small, turned_table = table.bfloat16(), torch.randn(WIDTH, 9, generator=draw).T
    wide = Int8Kernel(torch.randn(WIDTH, 3 * WIDTH, generator=draw), None, ours)
    chain = {"chain_plan.default": 1, "chain.default": 1, "getitem": 1}

    def embedded(tokens: Tensor) -> Tensor:
        out: Tensor = ours.ops.rows_int8(rows, scales, tokens)
        return out

    def joined(*parts: Tensor) -> Tensor:
        return torch.cat([normed(part) for part in parts], -1)

    pad = torch.nn.functional.pad
    return [
        ("a table in 8 bits", lambda t, x: one(embedded(t)), chain),
        ("in float32", lambda t, x: one(table[:].index_select(0, t.view(-1)).view(x.shape)), {}),
        ("by torch", lambda t, x: one(torch.nn.functional.embedding(t, table)), chain),
        ("in bfloat16", lambda t, x: one(torch.nn.functional.embedding(t, small).float()), chain),
        ("norms beside each other", lambda t, x: wide(joined(embedded(t), x, x * 2)), chain | {"mul.Tensor": 1}),
        ("and zeros behind them", lambda t, x: wide(pad(joined(embedded(t), x), (0, WIDTH))), chain),
        ("zeros before", lambda t, x: wide(pad(joined(embedded(t), x), (WIDTH, 0))), {}),
        ("something else behind", lambda t, x: wide(pad(joined(embedded(t), x), (0, WIDTH), value=1.0)), {}),
        ("parts of what was beside each other", partial(_split, joined, wide, embedded), chain),
        ("parts of other types", partial(_promoted, joined, wide, embedded), {}),
        ("ids of another type", lambda t, x: one(torch.nn.functional.embedding(t.int(), table)), {}),
        ("a table that is turned", lambda t, x: one(torch.nn.functional.embedding(t, turned_table)), {}),
        ("one is no norm", lambda t, x: wide(torch.cat([normed(x), x, normed(embedded(t))], -1)), {}),
        (
            "given in bfloat16",
            lambda t, x: wide(joined(embedded(t), x.bfloat16().float(), x)),
            chain | {"_to_copy.default": 1},
        ),
    ]


def _promoted(joined: Any, wide: Any, embedded: Any, t: Tensor, x: Tensor) -> Tensor:
    first, second = torch.split(torch.cat([x.bfloat16(), x], -1), WIDTH, -1)
    out: Tensor = wide(joined(first * first, embedded(t), second))
    return out


def _split(joined: Any, wide: Any, embedded: Any, t: Tensor, x: Tensor) -> Tensor:
    first, second = torch.split(torch.cat([x, x + 1.0], -1), WIDTH, -1)
    out: Tensor = wide(joined(first, embedded(t), second))
    return out


@pytest.mark.parametrize("case", range(len(before_cases())) if kernels() is not None else [])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5)])
def test_a_chain_begins_with_tokens(case: int, shape: tuple[int, int]) -> None:
    name, function, left = before_cases()[case]
    draw = torch.Generator().manual_seed(9)
    tokens, x = torch.randint(0, 9, shape, generator=draw), torch.randn(*shape, WIDTH, generator=draw)
    with torch.no_grad():
        graph = make_fx(function)(tokens, x)
        fuse(graph)
        graph.graph.lint()
        graph.recompile()
        assert torch.equal(graph(tokens, x), function(tokens, x)), name
    found = dict(calls(graph))
    assert not left or {key: count for key, count in found.items() if key != "add.Tensor"} == left, (name, found)
    if left and name != "in bfloat16":
        with pytest.raises(RuntimeError, match="outside of the table"):
            graph(tokens + 9, x)


class PlacedPass:
    """Attention of new tokens that are turned by where they stand and see what is before them, and what may be different."""

    def __init__(self, change: str) -> None:
        self.change, self.ours = change, of_here()
        draw = torch.Generator().manual_seed(10)
        self.layer = Int8Kernel(torch.randn(4 * 8, WIDTH, generator=draw), None, self.ours)
        self.frequencies = torch.rand(4, generator=draw)

    def given(self) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(11)
        x = torch.randn(1, 3, WIDTH, generator=draw)
        keys, values = (torch.randn(1, 1, 16, 8, generator=draw) for _ in range(2))
        positions = torch.tensor([[4, 8, 9]])
        at = torch.tensor([[6, 9, 11]]) if "apart" in self.change or self.change == "another column" else positions
        return x, positions, at, keys, values, torch.rand(1, 1, 3, 12, generator=draw) < 0.7

    def seen(self, positions: Tensor, at: Tensor) -> Tensor:
        change = self.change
        others = (positions + 1 if change == "other positions are seen" else positions)[:, None, :, None]
        columns = torch.arange(11 if change == "fewer columns are seen" else 12)
        before = "apart" in change or change == "one column for all"
        seen = columns < others if before else columns <= others
        if "a window" in change:
            seen = seen & (columns > others - 3)
        own = {"another column": at + 1, "one column for all": at[:, :1]}.get(change, at if before else None)
        if own is not None:
            seen = seen | (columns == own[:, None, :, None])
        if change == "the first is blind":
            seen = seen & ~((columns == 0) & (positions > 0)[:, None, :, None])
        return torch.nn.functional.pad(seen, (0, 1)) if change == "fewer columns are seen" else seen

    def __call__(self, *given: Tensor) -> Tensor:
        x, positions, at, keys, values, mask = given
        positions = positions.clamp(max=7) if self.change == "clamped" else positions
        seen = mask if self.change == "a mask is given" else self.seen(positions, at)
        cos, sin = self.ours.ops.angles(positions, self.frequencies, 1.5)
        cos, sin = (sin, cos) if self.change == "cosines for sines" else (cos, sin)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        packed = self.layer(x)
        parts = packed[..., :16], packed[..., 16:24], packed[..., 24:]
        query, key, value = (part.view(*x.shape[:2], -1, 8).transpose(1, 2) for part in parts)
        query, key = (part * cos + torch.cat([-part[..., 4:], part[..., :4]], -1) * sin for part in (query, key))
        keys.index_copy_(2, at[0], key)
        values.index_copy_(2, at[0], value)
        out: Tensor = self.ours.ops.attend(query, keys[:, :, :12], values[:, :, :12], seen, 0.4)
        return out.reshape(*x.shape[:2], -1)


@pytest.mark.parametrize(
    ("change", "placed"),
    [
        ("", True),
        ("apart", True),
        ("a window", True),
        ("apart, a window", True),
        ("clamped", True),
        ("other positions are seen", False),
        ("fewer columns are seen", False),
        ("another column", False),
        ("one column for all", False),
        ("cosines for sines", False),
        ("the first is blind", False),
        ("a mask is given", False),
    ],
)
def test_attention_is_told_positions_where_angles_and_masks_follow_from_them(change: str, placed: bool) -> None:
    function = PlacedPass(change)
    with torch.no_grad():
        graph = make_fx(function)(*function.given())
        fuse(graph)
        graph.graph.lint()
        graph.recompile()
        first, second = function.given(), function.given()
        got, want = graph(*first), function(*second)
    assert torch.equal(got, want)
    assert torch.equal(first[3], second[3])
    (plan,) = (node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "chain_plan.default")
    kinds = [number for number in (ATTENTION, PLACED) if number in (plan.args[1][0], plan.args[1][10])]
    assert kinds == [PLACED if placed else ATTENTION]
    found = calls(graph)
    assert bool(found["angles.default"]) is not placed
    if placed:
        assert set(found) == {"chain_plan.default", "chain.default", "getitem"}


def test_positions_of_other_tokens_are_refused(built: Kernels) -> None:
    kept = [*kept_of(built), torch.rand(4)]
    steps = [PLACED, -2, 0, 1, -1, -1, 4, 4, 7, 1, 9, 0, 0, 2, 0]
    plan = built.ops.chain_plan(kept, steps, [0.0, 0.0, 1.0, 1.0], [WIDTH, 0, 0], 1, 1)
    x, at = torch.randn(2, 2, WIDTH), torch.tensor([[0, 1], [1, 2]])
    (out,) = built.ops.chain(x, plan, [x, at, at], [3])
    assert out.shape == (2, 2, 8)
    before = kept[4].clone()
    for positions, columns, said in (
        (at[:1], 3, "other tokens"),
        (at.int(), 3, "int64"),
        (at, 4, "other sizes"),
        (at, -1, "other sizes"),
        (at, 2**61, "other sizes"),
    ):
        with pytest.raises(RuntimeError, match=said):
            built.ops.chain(x, plan, [x, positions, at], [columns])
    assert torch.equal(kept[4], before)
