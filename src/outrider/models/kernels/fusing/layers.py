"""Linear layers with what stands before and behind them, as one operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from outrider.models.kernels.fusing.parts import alone, aten, both_ways, given_to, replace, same_size

if TYPE_CHECKING:
    from torch.fx import GraphModule


def fuse_layers(graph: GraphModule, ops: Any) -> None:
    """Make one `fused_int8` or `fused_grouped` of a layer behind a norm or a gate, or whose result is added to something."""
    fused = {ops.linear_grouped.default: ops.fused_grouped.default, ops.linear_int8.default: ops.fused_int8.default}
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in fused:
            continue
        x, *layer = node.args
        norm, eps, more, gated, added, last = None, 0.0, 0.0, False, None, node
        gate = _gated(x, ops)
        if alone(x) and given_to(x, ops.rms_norm.default, 4)[0] is not None:
            x, norm, eps, more = x.args
        elif gate is not None:
            x, gated = gate, True
        user = next(iter(node.users), None)
        for result, other in both_ways(user, aten.add.Tensor) if alone(node) else ():
            if result is node and other is not node and _alike(node, other):
                last, added = user, other
        if norm is not None or gated or added is not None:
            replace(graph, last, fused[node.target], (x, norm, eps, more, gated, added, *layer))


def _gated(node: Any, ops: Any) -> Node | None:
    """What is `x` in silu(x[.., :half]) · x[.., half:], if nothing else reads these."""
    for gate, other in both_ways(node, aten.mul.Tensor):
        (of,) = given_to(gate, ops.silu.default, 1)
        x, dim, begin, half = given_to(of, aten.slice.Tensor, 4)
        if x is None or not all(alone(one) for one in (node, gate, of, other)):
            continue
        value = x.meta["val"]
        second = given_to(other, aten.slice.Tensor, 4)
        whole = isinstance(half, int) and isinstance(second[3], int) and second[3] >= 2 * half
        if whole and (begin, dim) == (0, value.dim() - 1) and value.shape[dim] == 2 * half and second[:3] == (x, dim, half):
            found: Node = x
            return found
    return None


def _alike(node: Node, other: Node) -> bool:
    one, two = node.meta["val"], other.meta["val"]
    same = one.dtype is two.dtype and one.dim() == two.dim()
    return bool(same and all(same_size(a, b) for a, b in zip(one.shape, two.shape, strict=True)))
