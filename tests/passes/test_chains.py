"""Operations of ours that follow each other, as one: which become part of it, its bits, and what it refuses."""

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
from outrider.models.kernels.fusing.chains import ADD, ATTENTION, EMBED, JOIN, LAST, LAYER, NORM, PLACED
from tests.helpers.chains import WIDTH, calls, kept_of, layers, of_here

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


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
        ("of the last tokens alone", lambda x, y: two(normed(one(x)[:, -1:])), 1, 0),
        ("with what is added to them", lambda x, y: two((z := one(x))[:, -1:]) + z[:, -1:], 1, 0),
        ("besides all of them", lambda x, y: (z := one(x), two(z)[:, -1:], two(z + y)), 1, 0),
        ("the last of the last", lambda x, y: two(one(x)[:, -1:])[:, -1:], 1, 0),
        ("the last and all together", lambda x, y: one(x)[:, -1:] + y, 1, 1),
        ("the last of what is given", lambda x, y: (one(two(x[:, -1:])), one(y)), 1, 2),
        ("the last of what is written later", partial(_last_before, made), 0, -1),
        ("all but the first ones, another shape", lambda x, y: one(two(x)[:, -2:]), 0, 3),
        ("the first tokens, another shape", lambda x, y: one(two(x)[:, :1]), 0, 3),
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


def _last_before(made: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    _, two, normed = made
    last = y[:, -1:]
    z = normed(x)
    y.index_copy_(1, torch.tensor([y.shape[1] - 1]), z[:, :1])
    return two(last), last + 1


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


def test_a_slice_without_an_end_is_no_reason_against_a_chain() -> None:
    one, two, _ = layers(of_here())
    with torch.no_grad():
        graph = make_fx(lambda x: two(one(x)) + two(x)[:, -1:])(torch.randn(2, 3, WIDTH))
        (cut,) = (node for node in graph.graph.nodes if node.target is torch.ops.aten.slice.Tensor)
        cut.args = (*cut.args[:3], None)
        fuse(graph)
    assert calls(graph)["chain.default"] == 1


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


def refused() -> list[tuple[list[int], list[float], int, int, str]]:
    """Steps, numbers, places, how many are returned, and what is said about them."""
    norm = [NORM, -2, 0, 0]
    return [
        ([], [], 0, 1, "more than it computes"),
        ([], [], 1, 1, "has not computed"),
        ([8, -2, 0, 0], [0.0] * 3, 1, 1, "no such step"),
        ([LAST, -3, 0, ADD, -2, -3, 0], [], 2, 1, "of other tokens"),
        ([LAST, -3, 0, JOIN, -2, 2, 2 * WIDTH, -3, 0, 0, 0], [0.0, 0.0], 2, 1, "of other tokens"),
        ([LAST, -3, 0, ATTENTION, -2, -3, 1, -1, -1, 4, 4, 2, 2, 3, -1, 0], [0.0] * 3, 2, 1, "of all tokens"),
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
