"""What the changes of a traced pass look at, and how they change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

if TYPE_CHECKING:
    from torch.fx import GraphModule

END = 2**63 - 1
aten = torch.ops.aten


def replace(graph: GraphModule, node: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Another call in the place of this one, and of what changes tensors for it alone."""
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(target, args)
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made)
    unused = [node]
    while unused:  # dead code is not taken away where it changes a tensor
        one = unused.pop()
        if not one.users and one.op == "call_function":
            before = one.all_input_nodes
            graph.graph.erase_node(one)
            unused += before


def given_to(node: Any, target: Any, count: int = 2) -> tuple[Any, ...]:
    """The arguments of a call of this operation; Nones for anything else."""
    found = getattr(node, "target", None) is target and not node.kwargs and len(node.args) == count
    return tuple(node.args) if found else (None,) * count


def both_ways(node: Any, target: Any) -> Iterator[tuple[Node, Node]]:
    """The arguments of a sum or product of two tensors, in either order."""
    first, second = given_to(node, target)
    if isinstance(first, Node) and isinstance(second, Node):
        yield first, second
        yield second, first


def schema_of(node: Any) -> Any:
    """Of what a call is of; None for anything else."""
    return getattr(node.target, "_schema", None) if isinstance(node, Node) and node.op == "call_function" else None


def makes_its_own(node: Any) -> bool:
    """Whether what a call gives is not a part of another tensor."""
    made = schema_of(node)
    return made is not None and all(one.alias_info is None for one in made.returns)


def alone(node: Any) -> bool:
    """Whether one other reads this."""
    return isinstance(node, Node) and len(node.users) == 1


def same_size(one: object, two: object) -> bool:
    """Of sizes, without deciding anything about them: a guard would bind the trace to it."""
    return str(one) == str(two)
