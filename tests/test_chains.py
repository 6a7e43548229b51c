"""Operations of ours that follow each other, as one: which become part of it, its bits, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from outrider.kernels.models import Kernels, build, kernels
from outrider.models.kernels.fusing import fuse
from outrider.models.kernels.fusing.chains import ADD, ATTENTION, EMBED, JOIN, LAYER, NORM, PLACED
from outrider.models.kernels.linear import Int4Kernel, Int8Kernel
from tests.test_fused_passes import calls
from tests.test_kernels import HERE

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")
WIDTH = 24


def of_here() -> Kernels:
    ours = kernels()
    assert ours is not None
    return ours


def layers(ours: Kernels) -> tuple[Int8Kernel, Int4Kernel, Callable[[Tensor], Tensor]]:
    draw = torch.Generator().manual_seed(5)
    weights = [torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(2)]
    norm = torch.rand(WIDTH, generator=draw)

    def normed(x: Tensor) -> Tensor:
        out: Tensor = ours.ops.rms_norm(x, norm, 1e-5, 0.5)
        return out

    return Int8Kernel(weights[0], None, ours), Int4Kernel(weights[1], torch.randn(WIDTH, generator=draw), ours), normed


def pass_cases() -> list[tuple[str, Callable[[Tensor, Tensor], Any], int, int]]:
    """What is computed, in how many chains, and how many operations stay outside of them, if that matters."""
    one, two, normed = made = layers(of_here())
    return [
        ("a row of steps", lambda x, y: two(one(normed(x)) + y), 1, 0),
        ("sums and norms between", lambda x, y: normed(two(normed(x)) + (n := normed(y))) + n, 1, 0),
        ("a step alone", lambda x, y: one(x) * y, 0, 2),
        ("what stands between does not depend on it", lambda x, y: two(one(x) + y * 2), 1, 1),
        ("what depends on it comes after", lambda x, y: ((z := one(x)) * 2, two(z + y)), 1, 1),
        ("and what depends on that, too", lambda x, y: (((z := one(x)) * 2) * 3, two(z + y)), 1, 2),
        ("what is between is needed", lambda x, y: one(two(one(normed(x)) * y)), 1, 2),
        ("several results, one of them read again", lambda x, y: (z := one(x), w := two(z), z + w + y), 1, 0),
        ("the same twice", lambda x, y: (z := one(two(x))) + z, 1, 0),
        ("another shape", lambda x, y: one(two(x)[:, :2]) + y[:, :2], 0, 4),
        ("rows and columns changed", lambda x, y: two(one(x.transpose(0, 1)) + y.transpose(0, 1)), 1, 2),
        ("a broadcast sum", lambda x, y: two(one(x)) + y[:, :1], 1, 2),
        ("many results that come and go", lambda x, y: _deep(x, y, one, two), 1, 0),
        ("a later chain reads what an earlier one made", lambda x, y: (z := one(two(x)), two(z * y + z))[1], 2, 1),
        (
            "and two earlier ones",
            lambda x, y: (z := one(two(x)), w := two(one(z * y + z)), one(two(w * y + z) + w))[2],
            3,
            2,
        ),
        ("a sum with one number a token", lambda x, y: two(one(x)) + y[..., :1], 1, 2),
        ("a bias that is a result", partial(_biased, made), 1, -1),
        ("what is read is written later", partial(_written_later, made), 0, -1),
        ("a part of what is written is read before", partial(_read_before, made), 0, -1),
        ("two chains", lambda x, y: one(two((one(two(x)) * y).relu())), 2, 2),
    ]


def _biased(made: Any, x: Tensor, y: Tensor) -> Tensor:
    """The bias is as an activation is if there is one token."""
    one, two, normed = made
    bias, scales = normed(torch.ones(1, 1, WIDTH)), one.get_buffer("scales")
    out: Tensor = of_here().ops.linear_int8(one(two(x)), one._packed, scales, bias, WIDTH)
    return out * y


def _written_later(made: Any, x: Tensor, y: Tensor) -> Tensor:
    one, two, _ = made
    z = one(y)
    y.index_copy_(1, torch.zeros(1, dtype=torch.long), torch.ones(len(y), 1, WIDTH))
    out: Tensor = two(z)
    return out


def _read_before(made: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    one, two, _ = made
    held = y[:, :2]
    z = one(x)
    y.index_copy_(1, torch.zeros(1, dtype=torch.long), z[:, :1])
    s = held.sum()
    return two(z) + s, s


def _deep(x: Tensor, y: Tensor, one: Any, two: Any) -> Tensor:
    for i in range(6):
        x, y = (one(x) + y, two(y)) if i % 2 else (two(x + y), y + x)
    return x + y


@pytest.mark.parametrize("case", range(len(pass_cases())) if kernels() is not None else [])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5)])
def test_what_follows_each_other_is_one_call_of_the_same_bits(case: int, shape: tuple[int, int]) -> None:
    name, function, chains, others = pass_cases()[case]
    draw = torch.Generator().manual_seed(6)
    x, y = (torch.randn(*shape, WIDTH, generator=draw) for _ in range(2))
    with torch.no_grad():
        graph = make_fx(function)(x.clone(), y.clone())
        fuse(graph)
        graph.graph.lint()
        graph.recompile()
        found = calls(graph)
        want = function(x.clone(), y.clone())
        for _ in range(2):
            got = graph(x.clone(), y.clone())
            pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
            assert all(torch.equal(a, b) for a, b in pairs), name
    if shape == (2, 5) or "shape" not in name:
        assert found["chain.default"] == found["chain_plan.default"] == chains, (name, found)
    if shape == (2, 5) and others >= 0:
        assert found.total() - 2 * found["chain.default"] - found["getitem"] == others, (name, found)


def test_results_that_are_returned_stay_what_they_are() -> None:
    """Those in between lie in memory that the next call writes over."""
    one, two, normed = layers(of_here())
    with torch.no_grad():
        graph = make_fx(lambda x: (z := one(x), two(normed(z))))(torch.randn(1, 3, WIDTH))
        fuse(graph)
        graph.recompile()
        first = graph(torch.ones(1, 3, WIDTH))
        before = [each.clone() for each in first]
        graph(torch.randn(4, 9, WIDTH))
        assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


@pytest.fixture(params=HERE)
def built(request: pytest.FixtureRequest) -> Kernels:
    return build(request.param)


def refused() -> list[tuple[list[int], list[float], int, int, str]]:
    """Steps, numbers, places, how many are returned, and what is said about them."""
    norm = [NORM, -2, 0, 0]
    return [
        ([], [], 0, 1, "more than it computes"),
        ([], [], 1, 1, "has not computed"),
        ([7, -2, 0, 0], [0.0] * 3, 1, 1, "no such step"),
        (norm[:3], [1e-5, 0.0], 1, 1, "within a step"),
        (norm, [1e-5], 1, 1, "lacks numbers"),
        ([NORM, -2, 99, 0], [1e-5, 0.0], 1, 1, "not given"),
        ([NORM, -2, -1, 0], [1e-5, 0.0], 1, 1, "not given"),
        ([NORM, -2, 0, 99], [1e-5, 0.0], 1, 1, "no such tensor"),
        ([NORM, -2, 0, -1], [1e-5, 0.0], 1, 1, "no such tensor"),
        ([NORM, -3, 0, 0], [1e-5, 0.0], 1, 1, "no such result"),
        ([NORM, 0, 0, 0], [1e-5, 0.0], 1, 1, "no such result"),
        ([NORM, -2, -2, 0], [1e-5, 0.0], 1, 1, "has not computed"),
        ([NORM, -2, -9, 0], [1e-5, 0.0], 1, 1, "has not computed"),
        ([*norm, *norm], [1e-5, 0.0] * 2, 1, 1, "overwritten"),
        ([NORM, -2, 0, 1], [1e-5, 0.0], 1, 1, "as long as its weight"),
        ([NORM, -2, 2, 0], [1e-5, 0.0], 1, 1, "have a width"),
        ([ADD, -2, 0, 1], [], 1, 1, "another width"),
        ([LAYER, -2, 0, -1, 0, -1, 2, -1, -1, 999], [0.0, 0.0], 1, 1, "so many outputs"),
        ([LAYER, -2, 0, -1, 0, 1, 2, 3, -1, WIDTH], [0.0, 0.0], 1, 1, "another width"),
        ([LAYER, -2, 1, -1, 0, -1, 2, 3, -1, WIDTH], [0.0, 0.0], 1, 1, "other columns"),  # filled up to as many
        ([ATTENTION, -2, 0, 2, -1, -1, 4, 4, 2, 2, 3, -1, 0], [0.0] * 3, 1, 1, "can't share"),
        ([ATTENTION, -2, 0, 1, -1, -1, 4, 5, 2, 2, 3, -1, 0], [0.0] * 3, 1, 1, "other sizes"),
        ([ATTENTION, -2, 0, 1, -1, -1, 4, 4, 2, 2, 9, -1, 0], [0.0] * 3, 1, 1, "not given"),
        ([PLACED, -2, 0, 1, -1, -1, 4, 4, 2, 2, 9, 0, 0, 2, 0], [0.0] * 4, 1, 1, "frequencies"),
        ([PLACED, -2, 0, 1, -1, -1, 4, 4, 0, 9, 9, 0, 0, 2, 0], [0.0] * 4, 1, 1, "not given"),
        ([PLACED, -2, 0, 1, -1, -1, 4, 4, 0, 2, 9, 0, 0, 9, 0], [0.0] * 4, 1, 1, "not given"),
        ([PLACED, -2, 0, 1, -1, -1, 4, 4, 0, 2, 9, 0, -1, 2, 0], [0.0] * 4, 1, 1, "a window has columns"),
        ([PLACED, -2, 0, 1, -1, -1, 4, 4, 0, 2, 9, 0, 0, 2, 0], [0.0] * 3, 1, 1, "lacks numbers"),
        ([EMBED, -2, 9, 6, -1], [], 1, 1, "not given"),
        ([EMBED, -2, 2, 9, -1], [], 1, 1, "no such tensor"),
        ([EMBED, -2, 2, 0, -1], [], 1, 1, "a table is"),
        ([EMBED, -2, 2, 6, 0], [], 1, 1, "of int8"),
        ([JOIN, -2, 0, WIDTH], [0.0, 0.0], 1, 1, "wider than its result"),
        ([JOIN, -2, 1, WIDTH - 1, 0, 0], [0.0, 0.0], 1, 1, "wider than its result"),
        ([JOIN, -2, 1, WIDTH, 0, 1], [0.0, 0.0], 1, 1, "as long as its weight"),
        ([JOIN, -2, 2, 2 * WIDTH, 0, 0, 2, 0], [0.0, 0.0], 1, 1, "have a width"),
    ]


def kept_of(built: Kernels) -> list[Tensor]:
    """What plans are made of in these tests."""
    layer = Int8Kernel(torch.randn(WIDTH, WIDTH), None, built)
    weights = [torch.ones(WIDTH), torch.ones(WIDTH + 1), layer._packed, layer.get_buffer("scales")]
    return [*weights, torch.randn(2, 1, 3, 8), torch.randn(2, 1, 4, 8), torch.randn(5, WIDTH)]


@pytest.mark.parametrize("case", range(len(refused())))
def test_steps_that_make_no_sense_are_refused(built: Kernels, case: int) -> None:
    steps, numbers, places, returned, said = refused()[case]
    with pytest.raises(RuntimeError, match=said):
        built.ops.chain_plan(kept_of(built), steps, numbers, [WIDTH, 8, 0, 0], places, returned)


def attention_of(built: Kernels, kept: list[Tensor], count: int = 0) -> Tensor:
    """The plan of one attention, of a head of 8 numbers in 3 columns, the added width of another tensor after it."""
    steps = [ATTENTION, -3, 0, 1, -1, -1, 4, 4, 1, 1, 2, -1, count, ADD, -2, -3, 3]
    plan: Tensor = built.ops.chain_plan(kept, steps, [0.0, 0.0, 1.0], [WIDTH, 0, 0, 8], 2, 1)
    return plan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", ""),
        ("no activations", "float32"),
        ("another width", "float32"),
        ("other tokens", "float32"),
        ("other rows of columns", "other tokens|other sizes"),
        ("fewer tensors", "other tensors than was planned"),
        ("a column too far", "outside of what is kept"),
        ("more columns than there are", "other sizes"),
        ("no count", "no such count"),
        ("more is rotated", "more is rotated"),
        ("bytes that are no plan", "not a plan"),
        ("half a plan", "not a plan"),
        ("no bytes", "of bytes"),
    ],
)
def test_what_does_not_fit_a_plan_is_refused(built: Kernels, change: str, said: str) -> None:
    kept = kept_of(built)
    plan, columns = attention_of(built, kept, 1 if change == "no count" else 0), 3
    before = kept[4].clone()
    angles, at = torch.randn(1, 1, 2, 8), torch.tensor([[0, 1], [1, 2]])
    given = [torch.randn(2, 2, WIDTH), angles, at, torch.randn(2, 2, 8)]
    like = given[0]
    if change == "no activations":
        given[0] = given[0].double()
    elif change == "another width":
        given[3] = torch.randn(2, 2, 16)
    elif change == "other tokens":
        like = torch.randn(2, 3, WIDTH)
    elif change == "other rows of columns":
        given[2] = at[:1]
    elif change == "fewer tensors":
        given.pop()
    elif change == "a column too far":
        given[2] = at + 1
    elif change == "more columns than there are":
        columns = 4
    elif change == "more is rotated":
        given[1] = torch.randn(1, 1, 2, 16)
    elif change == "bytes that are no plan":
        plan = torch.zeros_like(plan)
    elif change == "half a plan":
        plan = plan[: len(plan) // 2].clone()
    elif change == "no bytes":
        plan = plan.view(torch.long)
    if said:
        with pytest.raises(RuntimeError, match=said):
            built.ops.chain(like, plan, given, [columns])
        assert torch.equal(kept[4], before)
    else:
        (out,) = built.ops.chain(like, plan, given, [columns])
        assert out.shape == (2, 2, 8)
        assert not torch.equal(kept[4], before)


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
    ours = of_here()
    draw = torch.Generator().manual_seed(10)
    layer = Int8Kernel(torch.randn(4 * 8, WIDTH, generator=draw), None, ours)
    frequencies = torch.rand(4, generator=draw)

    def function(x: Tensor, positions: Tensor, at: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        positions = positions.clamp(max=7) if change == "clamped" else positions
        others = positions + 1 if change == "other positions are seen" else positions
        columns = torch.arange(11 if change == "fewer columns are seen" else 12)
        seen = (
            columns < others[:, None, :, None]
            if "apart" in change or change == "one column for all"
            else columns <= others[:, None, :, None]
        )
        if "a window" in change:
            seen = seen & (columns > others[:, None, :, None] - 3)
        if "apart" in change or change in ("another column", "one column for all"):
            own = at + 1 if change == "another column" else at[:, :1] if change == "one column for all" else at
            seen = seen | (columns == own[:, None, :, None])
        if change == "the first is blind":
            seen = seen & ~((columns == 0) & (positions > 0)[:, None, :, None])
        if change == "fewer columns are seen":
            seen = torch.nn.functional.pad(seen, (0, 1))
        if change == "a mask is given":
            seen = mask
        cos, sin = ours.ops.angles(positions, frequencies, 1.5)
        cos, sin = (sin, cos) if change == "cosines for sines" else (cos, sin)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        packed = layer(x)
        query, key, value = (
            part.view(*x.shape[:2], -1, 8).transpose(1, 2)
            for part in (packed[..., :16], packed[..., 16:24], packed[..., 24:])
        )
        query, key = (part * cos + torch.cat([-part[..., 4:], part[..., :4]], -1) * sin for part in (query, key))
        keys.index_copy_(2, at[0], key)
        values.index_copy_(2, at[0], value)
        out: Tensor = ours.ops.attend(query, keys[:, :, :12], values[:, :, :12], seen, 0.4)
        return out.reshape(*x.shape[:2], -1)

    def given() -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(11)
        x = torch.randn(1, 3, WIDTH, generator=draw)
        keys, values = (torch.randn(1, 1, 16, 8, generator=draw) for _ in range(2))
        positions = torch.tensor([[4, 8, 9]])
        at = torch.tensor([[6, 9, 11]]) if "apart" in change or change == "another column" else positions
        return x, positions, at, keys, values, torch.rand(1, 1, 3, 12, generator=draw) < 0.7

    with torch.no_grad():
        graph = make_fx(function)(*given())
        fuse(graph)
        graph.graph.lint()
        graph.recompile()
        first, second = given(), given()
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
