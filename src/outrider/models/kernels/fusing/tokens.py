"""What a pass computes before its first layer: which columns its tokens see, and what is joined of states and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node

from outrider.models.kernels.fusing.parts import END, alone, aten, both_ways, given_to, replace, same_size

if TYPE_CHECKING:
    from torch.fx import GraphModule


def fuse_masks(graph: GraphModule, ops: Any) -> None:
    """Make one `seen` of a mask (`models.cache.masks`): columns up to a token's position, or before it and its own."""
    for node in list(graph.graph.nodes):
        found = _mask(node)
        if found is not None and not any(_mask(user) for user in node.users):  # the whole of it
            replace(graph, node, ops.seen.default, (found.positions, found.at, found.columns, found.window))


class _Mask(NamedTuple):
    """positions int64 [R, N]; columns: how many; window: 0 for none; at: the tokens' own columns, where `before` asks for
    them.
    """

    positions: Node
    columns: object
    window: int
    before: bool
    at: Node | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is missing of it."""
        return self.before == (self.at is not None)


def _mask(node: Any) -> _Mask | None:
    """What this mask [R, 1, N, columns] is, if it is one."""
    found = _own(node) or _in_window(node)
    return found if found is not None and found.whole else None


def _own(node: Any) -> _Mask | None:
    for rest, equal in both_ways(node, aten.bitwise_or.Tensor):
        keys, at = given_to(equal, aten.eq.Tensor)
        found = _in_window(rest)
        if found is not None and found.before and _columns(keys) == found.columns:
            own = _each(at)
            alike = own is not None and _alike(own, found.positions)
            return found._replace(at=own) if alike else None
    return None


def _in_window(node: Any) -> _Mask | None:
    for rest, recent in both_ways(node, aten.bitwise_and.Tensor):
        found = _causal(rest)
        keys, first = given_to(recent, aten.gt.Tensor)
        queries, window = given_to(first, aten.sub.Tensor)
        if found is not None and isinstance(window, int) and window > 0 and _columns(keys) == found.columns:
            return found._replace(window=window) if _each(queries) is found.positions else None
    return _causal(node)


def _causal(node: Any) -> _Mask | None:
    for target, before in ((aten.le.Tensor, False), (aten.lt.Tensor, True)):
        keys, queries = given_to(node, target)
        columns, positions = _columns(keys), _each(queries)
        if columns is not None and positions is not None:
            return _Mask(positions, columns, 0, before)
    return None


def _alike(one: Node, two: Node) -> bool:
    return all(same_size(a, b) for a, b in zip(one.meta["val"].shape, two.meta["val"].shape, strict=True))


def _columns(node: Any) -> Any:
    """How many: of `arange(columns)`."""
    if not isinstance(node, Node) or node.target is not aten.arange.default or len(node.args) != 1:
        return None
    whole = isinstance(_size(node.args[0]), int | torch.SymInt) and node.meta["val"].dtype is torch.int64
    return node.args[0] if whole else None


def _each(node: Any) -> Node | None:
    """X int64 [R, N] of x[:, None, :, None]."""
    inner, last = given_to(node, aten.unsqueeze.default)
    x, first = given_to(inner, aten.unsqueeze.default)
    if (first, last) != (1, 3) or not isinstance(x, Node):
        return None
    value = x.meta["val"]
    return x if value.dtype is torch.int64 and value.dim() == 2 else None


def fuse_expanded(graph: GraphModule, ops: Any) -> None:
    """Leave out what makes a mask of the shape that it has."""
    for node in list(graph.graph.nodes):
        mask, shape = given_to(node, aten.expand.default)
        if mask is not None and getattr(mask, "target", None) is ops.seen.default and _keeps(mask, shape):
            node.replace_all_uses_with(mask)


def _keeps(mask: Node, shape: Sequence[Any]) -> bool:
    return all(each == -1 or same_size(_size(each), size) for each, size in zip(shape, mask.meta["val"].shape, strict=True))


def _size(each: Any) -> Any:
    return each.meta["val"] if isinstance(each, Node) else each


def fuse_joins(graph: GraphModule, ops: Any) -> None:
    """Make one `join` of norms beside each other, and zeros behind them."""
    for node in list(graph.graph.nodes):
        parts, last = given_to(node, aten.cat.default)
        if not isinstance(parts, list | tuple) or node.meta["val"].dim() != 3 or last not in (-1, 2):
            continue
        normed = [given_to(part, ops.rms_norm.default, 4) for part in parts if alone(part)]
        xs, weights, *numbers = zip(*normed, strict=True) if normed else ((None,), ())
        if len(normed) < len(parts) or None in xs or len(set(zip(*numbers, strict=True))) != 1:
            continue
        user = next(iter(node.users), None)
        whole = user if user is not None and alone(node) and _adds_zeros_behind(user) else node
        width = whole.meta["val"].shape[-1]
        if isinstance(width, int):
            replace(graph, whole, ops.join.default, (list(xs), list(weights), *normed[0][2:], width))


def _adds_zeros_behind(node: Node) -> bool:
    """To the last dimension."""
    if node.target is not aten.constant_pad_nd.default or node.kwargs:
        return False
    _, pads, value = (*node.args, 0.0)[:3]
    if not isinstance(pads, list | tuple) or len(pads) != 2 or value != 0.0:
        return False
    before, behind = pads
    return bool(before == 0 and isinstance(behind, int) and behind >= 0)


def split_again(graph: GraphModule, ops: Any) -> None:
    """Read the parts of what was put beside each other themselves: x of cat([x, …])[.., : width of x]."""
    del ops
    for node in list(graph.graph.nodes):
        whole, dim, begin, end = given_to(node, aten.slice.Tensor, 4)
        parts, last = given_to(whole, aten.cat.default)
        if not isinstance(parts, list | tuple) or (dim, last) not in ((2, -1), (2, 2)) or whole.meta["val"].dim() != 3:
            continue
        if any(part.meta["val"].dtype is not whole.meta["val"].dtype for part in parts):
            continue
        at = 0
        for part in parts:
            width = part.meta["val"].shape[-1]
            if not isinstance(width, int):
                break
            if begin == at and (end == at + width or (end == END and part is parts[-1])):
                node.replace_all_uses_with(part)
                break
            at += width
