"""Fewer operations in a traced pass: what stands side by side becomes one operation of ours.

A call takes some microseconds, as long as the work of most operations on a few tokens, and beside weights that sweep the
caches ten times as long. Each of these gives the bits of those it replaces, so a recorded pass stays the ordinary one
(`recording` compares them). Five are left of a layer of Llama's kind, and then one of all layers:

    attend_new                   rotations of queries and keys, keeping keys and values, attention
    fused_int8, fused_grouped    a norm, or a gate silu(x) · y, then the linear layer, then adding what goes past it
    chain                        any number of these that follow each other, norms and sums between them, and before them
                                 tokens looked up in a table, the angles of their positions and what these see
    seen, join                   a mask; norms beside each other

Only passes that have our operations already are changed; what is not found in this very shape stays as it is. One operation
reads where the last of several did, so a pass that writes into what is read elsewhere is left alone: by then it may be
something else.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from outrider.kernels.build import level_here
from outrider.kernels.models import LIBRARY
from outrider.models.kernels.fusing.attention import fuse_attention, fuse_rotations
from outrider.models.kernels.fusing.chains import fuse_chains
from outrider.models.kernels.fusing.layers import fuse_layers
from outrider.models.kernels.fusing.parts import END, alone, aten, given_to, makes_its_own, replace, schema_of
from outrider.models.kernels.fusing.tokens import fuse_expanded, fuse_joins, fuse_masks, split_again

if TYPE_CHECKING:
    from torch.fx import GraphModule

_VIEWS = (aten.unsqueeze.default, aten.expand.default, aten.select.int, aten.slice.Tensor)


def fuse(graph: GraphModule) -> None:
    """Change a traced pass in place."""
    ops = fuse_operations(graph)
    if ops is not None:
        fuse_chains(graph, ops)
        graph.graph.eliminate_dead_code()


def fuse_operations(graph: GraphModule) -> Any:
    """All but the last step, chains; → our operations, None if it was left as it is."""
    ops = _ops(graph)
    if ops is None or any(_writes(node) for node in graph.graph.nodes):
        return None
    before = (fuse_masks, fuse_expanded, fuse_joins)
    for change in (_simplify, _share_views, *before, fuse_rotations, fuse_attention, fuse_layers, split_again):
        change(graph, ops)
        graph.graph.eliminate_dead_code()
    return ops


def _ops(graph: GraphModule) -> Any:
    """Our operations, if it has one of them."""
    space = LIBRARY.within(level_here() or "")
    used = any(getattr(node.target, "namespace", "") == space for node in graph.graph.nodes if node.op == "call_function")
    return getattr(torch.ops, space) if used else None


def _writes(node: Node) -> bool:
    """Whether it writes into a tensor that is read elsewhere, other than keys and values into those that are kept."""
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return False
    into = node.args[0]
    if isinstance(into, Node) and into.op == "placeholder":
        return node.target not in (aten.index_copy_.default, aten.index_put_.default)
    return not (makes_its_own(into) and alone(into)) and not _unread(into, node)


def _unread(into: Any, write: Node) -> bool:
    """Whether nothing computes with what is written into before it is: no reading of it can come to stand behind that."""
    while isinstance(into, Node) and into.op == "call_function" and not makes_its_own(into):
        into = into.args[0]
    if not isinstance(into, Node) or into.op != "call_function":
        return False
    parts = [into]
    while parts:
        for user in parts.pop().users:
            if not makes_its_own(user) or user.target is aten._unsafe_view.default:
                parts.append(user)
            elif user < write:
                return False
    return True


def _simplify(graph: GraphModule, ops: Any) -> None:
    """Less of what computes nothing: names for the same, copies of what nothing changes, there and back, halves."""
    linear = (ops.linear_grouped.default, ops.linear_int8.default)
    for node in list(graph.graph.nodes):
        (same,) = given_to(node, aten.alias.default, 1)
        (copied,) = given_to(node, aten.clone.default, 1)
        pieces, which = given_to(node, operator.getitem)
        x, size, dim = given_to(pieces, aten.split.Tensor, 3)
        inner, *there = given_to(node, aten.transpose.int, 3)
        before, *back = given_to(inner, aten.transpose.int, 3)
        whole, *part = given_to(node, aten.slice.Tensor, 4)
        if same is not None:
            node.replace_all_uses_with(same)
        elif whole is not None and _is_all(whole, *part):
            node.replace_all_uses_with(whole)
        elif before is not None and there == back:
            node.replace_all_uses_with(before)
        elif copied is not None and copied.target in linear and alone(copied):
            node.replace_all_uses_with(copied)
        elif isinstance(size, int):
            dim %= x.meta["val"].dim()
            replace(graph, node, aten.slice.Tensor, (x, dim, which * size, (which + 1) * size))


def _is_all(x: Node, dim: int, begin: object, end: int) -> bool:
    """Whether a slice is all of what it is of."""
    size = x.meta["val"].shape[dim]
    return begin == 0 and (end == END or (isinstance(size, int) and end == size))


def _share_views(graph: GraphModule, ops: Any) -> None:
    """One view where a pass makes the same of the same several times."""
    del ops
    made: dict[object, Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _VIEWS and not node.kwargs:
            key = (node.target, *(tuple(arg) if isinstance(arg, list) else arg for arg in node.args))
            first = made.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
