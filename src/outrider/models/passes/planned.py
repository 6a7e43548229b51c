"""A recorded graph as a function of what differs from pass to pass: what is the same in each is read once.

A model has hundreds of weights, and handing them to the interpreter, which hands them on, takes a tenth of the time of a
small model's pass. Where operations of ours read them, they read them when a plan is made (`kernels/chain.cpp`), for the
memory where keys and values lie, and a pass is given that plan. A graph that is one such operation, of one row, needs no
interpreter at all, and its row may be the tokens of several sequences (`PlannedGraph.call`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.chain_calls import ChainPlan, Piece, Place, Span
from outrider.kernels.models import chain_calls

_CHAIN, _PLAN = "::chain", "::chain_plan"
_LISTS = ("prim::Constant", "prim::ListConstruct", "aten::__getitem__")
_address: Any = torch.UntypedStorage.data_ptr
_jit: Any = torch._C  # parts of which have no types


@dataclass(frozen=True)
class _Plan:
    """An operation that is called once. tensors: which of the graph's inputs it reads; others: its other arguments."""

    operation: Any
    tensors: tuple[int, ...]
    others: tuple[Any, ...]


@dataclass(frozen=True)
class _Whole:
    """Of a graph that is one chain.

    space: the namespace of its operation. given, counts: which of columns, capacity and what the pass is about it is given;
    outputs: which of the graph's each of its results is.
    """

    space: str
    given: tuple[int, ...]
    counts: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Bound:
    """What a pass reads in one place of memory.

    leading: which of columns, capacity and what the pass is about are given; then come rest. held: what plans have addresses
    of, which would be somebody else's memory if a weight were replaced in the middle of a sequence; at: where it lay. whole:
    the plan of a graph that is one chain.
    """

    leading: tuple[int, ...]
    rest: tuple[Any, ...]
    held: tuple[Any, ...]
    at: list[int]
    whole: ChainPlan | None

    @property
    def in_place(self) -> bool:
        """Whether all lies where it lay: `share_memory` and its like move what a storage holds. 12 µs for 300 storages."""
        return list(map(_address, self.held)) == self.at


class PlannedGraph:
    """The function of a graph's text (`tracing` has the order of its inputs, `graph_text` the text)."""

    def __init__(self, text: str) -> None:
        graph = _jit.parse_ir(text)
        self._count = len(list(graph.inputs()))
        self._plans = _take_plans(graph)
        self._whole = _whole(graph) if len(self._plans) == 1 else None
        self._inputs = _take_unused(graph)[: -len(self._plans) or None]
        self._call = _jit._create_function_from_graph("recorded_pass", graph)

    @property
    def has_plans(self) -> bool:
        return bool(self._plans)

    @property
    def in_one_call(self) -> bool:
        """Whether `call` gives a row's results."""
        return self._whole is not None

    def bind(self, rows: Sequence[Tensor], parts: Sequence[Any]) -> Bound:
        """The last of the graph's inputs, as they lie in memory now: keys and values, and parts of the model."""
        read = [*rows, *parts]
        before = self._count - len(read)
        if any(i < before for plan in self._plans for i in plan.tensors):
            raise RuntimeError("a plan reads what differs from pass to pass")
        leading = tuple(i for i in self._inputs if i < before)
        rest = [read[i - before] for i in self._inputs if i >= before]
        held: dict[int, Any] = {}
        for plan in self._plans:
            tensors = [read[i - before] for i in plan.tensors]
            rest.append(plan.operation(tensors, *plan.others))
            held.update((storage._cdata, storage) for storage in (tensor.untyped_storage() for tensor in tensors))
        at = [storage.data_ptr() for storage in held.values()]
        whole = None if self._whole is None else ChainPlan(chain_calls[self._whole.space], rest[-1])
        return Bound(leading, tuple(rest), tuple(held.values()), at, whole)

    def run(self, bound: Bound, columns: int, capacity: int, about: Sequence[Any]) -> list[Any]:
        leading = (columns, capacity, *about)
        optimizes = _jit._get_graph_executor_optimize()
        _jit._set_graph_executor_optimize(False)  # nothing fused, nothing made for these sizes
        try:
            return self._call(*[leading[i] for i in bound.leading], *bound.rest)  # type: ignore[no-any-return]
        finally:
            _jit._set_graph_executor_optimize(optimizes)

    def call(
        self,
        bound: Bound,
        columns: int,
        capacity: int,
        spans: Sequence[Span],
        about: Sequence[Piece],
        into: Sequence[Place] = (),
        without: int = 0,
    ) -> list[Tensor]:
        """The same of N tokens of some sequences without the interpreter, if it is `in_one_call`.

        into: where the last of the results are kept. without: how many of the first are not wanted. → those between, float32
        [1, N, width], or [1, len(spans), width] of last tokens alone
        """
        whole, plan = self._whole, bound.whole
        assert whole is not None
        assert plan is not None
        made = len(whole.outputs) - len(into)
        out: dict[int, Tensor] = {}
        results = []
        for output, width, single in zip(whole.outputs, plan.widths, plan.single, strict=True):
            if output < without:
                results.append(0)
            elif output < made:
                rows = len(spans) if single else sum(count for _, count, _ in spans)
                out[output] = torch.empty(1, rows, width, dtype=torch.float32, device="cpu")
                results.append(out[output].data_ptr())
            else:
                at, kept = into[output - made]
                assert kept == width
                results.append(at)
        counts = (columns, capacity)
        plan.run(spans, [about[i - 2] for i in whole.given], [counts[i] for i in whole.counts], results)
        return [out[i] for i in range(without, made)]


def _whole(graph: Any) -> _Whole | None:
    """If it is one chain, whose results are what it returns."""
    (made,) = [node for node in graph.nodes() if node.kind().endswith(_CHAIN)]
    others = {node.kind() for node in graph.nodes()} - {made.kind(), *_LISTS}
    at = {value.unique(): i for i, value in enumerate(graph.inputs())}
    _, _, given, counts = made.inputs()
    which, of_counts = ([at.get(value.unique(), -1) for value in each.node().inputs()] for each in (given, counts))
    (returned,) = graph.outputs()
    found = [list(value.node().inputs()) for value in returned.node().inputs()]
    if others or min(which, default=0) < 2 or not set(of_counts) <= {0, 1}:
        return None
    if any(len(each) != 2 or each[0].unique() != made.output().unique() for each in found):
        return None
    order = [each[1].toIValue() for each in found]
    if sorted(order) != list(range(len(order))):
        return None
    space = made.kind().removesuffix(_CHAIN)
    return _Whole(space, tuple(which), tuple(of_counts), tuple(order.index(i) for i in range(len(order))))


def _take_plans(graph: Any) -> list[_Plan]:
    """Make further inputs, behind the others, of what plans are in a graph."""
    at = {value.unique(): i for i, value in enumerate(graph.inputs())}
    plans = []
    for node in [node for node in graph.nodes() if node.kind().endswith(_PLAN)]:
        tensors, *others = node.inputs()
        space = node.kind().removesuffix(_PLAN)
        which = tuple(at[tensor.unique()] for tensor in tensors.node().inputs())
        plans.append(_Plan(getattr(torch.ops, space).chain_plan, which, tuple(each.toIValue() for each in others)))
        given = graph.addInput()
        given.setType(node.output().type())
        node.output().replaceAllUsesWith(given)
        node.destroy()
        tensors.node().destroy()
    return plans


def _take_unused(graph: Any) -> list[int]:
    """Take away the inputs that nothing reads. → which are left"""
    values = list(graph.inputs())
    left = [i for i, value in enumerate(values) if value.uses()]
    for i in reversed(range(len(values))):
        if not values[i].uses():
            graph.eraseInput(i)
    return left
