"""A recorded graph as a function of what differs from pass to pass: what is the same in each is read once.

A model has hundreds of weights, and handing them to the interpreter, which hands them on, takes a tenth of the time of a
small model's pass. Where operations of ours read them, they read them when a plan is made (`kernels/chain.cpp`), for the
memory where keys and values lie, and a pass is given that plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PLAN = "::chain_plan"
_jit: Any = torch._C  # parts of which have no types


@dataclass(frozen=True)
class _Plan:
    """An operation that is called once. tensors: which of the graph's inputs it reads; others: its other arguments."""

    operation: Any
    tensors: tuple[int, ...]
    others: tuple[Any, ...]


@dataclass(frozen=True)
class Bound:
    """What a pass reads in one place of memory.

    leading: which of columns, capacity and what the pass is about are given; then come rest. held: what plans have addresses
    of, which would be somebody else's memory if a weight were replaced in the middle of a sequence; at: where it lay.
    """

    leading: tuple[int, ...]
    rest: tuple[Any, ...]
    held: tuple[Any, ...]
    at: list[int]

    @property
    def in_place(self) -> bool:
        """Whether all lies where it lay: `share_memory` and its like move what a storage holds. 12 µs for 300 storages."""
        return [storage.data_ptr() for storage in self.held] == self.at


class PlannedGraph:
    """The function of a graph's text (`tracing` has the order of its inputs, `graph_text` the text)."""

    def __init__(self, text: str) -> None:
        graph = _jit.parse_ir(text)
        self._count = len(list(graph.inputs()))
        self._plans = _take_plans(graph)
        self._inputs = _take_unused(graph)[: -len(self._plans) or None]
        self._call = _jit._create_function_from_graph("recorded_pass", graph)

    @property
    def has_plans(self) -> bool:
        return bool(self._plans)

    def bind(self, read: Sequence[Any]) -> Bound:
        """read: the last of the graph's inputs: keys and values, and parts of the model, as they lie in memory now."""
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
        return Bound(leading, tuple(rest), tuple(held.values()), [storage.data_ptr() for storage in held.values()])

    def run(self, bound: Bound, columns: int, capacity: int, about: Sequence[Any]) -> list[Any]:
        leading = (columns, capacity, *about)
        optimizes = _jit._get_graph_executor_optimize()
        _jit._set_graph_executor_optimize(False)  # nothing fused, nothing made for these sizes
        try:
            return self._call(*[leading[i] for i in bound.leading], *bound.rest)  # type: ignore[no-any-return]
        finally:
            _jit._set_graph_executor_optimize(optimizes)


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
