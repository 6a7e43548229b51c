"""Rotations, and attention of new tokens with all that keeps them, as one operation each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from outrider.models.kernels.fusing.parts import END, alone, aten, both_ways, given_to, replace, same_size

if TYPE_CHECKING:
    from torch.fx import GraphModule

KEPT = (torch.float32, torch.float16)  # types of keys and values that `attend_new` writes and reads


def fuse_rotations(graph: GraphModule, ops: Any) -> None:
    """Make one `rotate` of what turns queries or keys to their positions."""
    for node in list(graph.graph.nodes):
        parts = _rotated(node)
        if parts is not None:
            replace(graph, node, ops.rotate.default, parts)


def _rotated(node: Node) -> tuple[Node, Node, Node] | None:
    """x, cos and sin of x · cos + cat(−x[.., half:], x[.., :half]) · sin."""
    for plain, turned in both_ways(node, aten.add.Tensor):
        x, cos = given_to(plain, aten.mul.Tensor)
        both, sin = given_to(turned, aten.mul.Tensor)
        parts, last = given_to(both, aten.cat.default)
        if last not in (-1, 3) or not isinstance(parts, list | tuple) or len(parts) != 2:
            continue
        (upper,) = given_to(parts[0], aten.neg.default, 1)
        if not all(isinstance(node, Node) for node in (x, cos, sin)):
            continue
        value = x.meta["val"]
        size = value.shape[-1] if value.dim() == 4 else 0
        if value.dtype is not torch.float32 or not isinstance(size, int) or size == 0 or size % 2:
            continue
        *second, end = given_to(upper, aten.slice.Tensor, 4)
        first = given_to(parts[1], aten.slice.Tensor, 4)
        if second == [x, 3, size // 2] and isinstance(end, int) and end >= size and first == (x, 3, 0, size // 2):
            return (x, cos, sin) if _angles(value, cos) and _angles(value, sin) else None
    return None


def _angles(value: Tensor, node: Any) -> bool:
    """Whether this is [1 or B, 1, N, size] in float32."""
    of = node.meta["val"]
    if of.dim() != 4 or of.dtype is not torch.float32:
        return False
    rows = same_size(of.shape[0], value.shape[0]) or same_size(of.shape[0], 1)
    sizes = [same_size(of.shape[i], value.shape[i]) for i in (2, 3)]
    return rows and all(sizes) and same_size(of.shape[1], 1)


def fuse_attention(graph: GraphModule, ops: Any) -> None:
    """Make one `attend_new` of an attention to what the pass has kept, of parts of one layer's result."""
    for node in list(graph.graph.nodes):
        given = _new_attention(node, ops)
        flat = next(iter(node.users)) if given is not None and alone(node) else None
        if given is not None and flat is not None and _is_flat(flat, node):
            replace(graph, flat, ops.attend_new.default, given)


def _is_flat(node: Node, of: Node) -> bool:
    """Whether this is [R, N, heads · size] of [R, N, heads, size]."""
    if given_to(node, aten.view.default)[0] is not of:
        return False
    shape, before = node.meta["val"].shape, of.meta["val"].shape
    return len(shape) == 3 and all(same_size(a, b) for a, b in zip(shape[:2], before[:2], strict=True))


def _new_attention(node: Node, ops: Any) -> tuple[Any, ...] | None:
    """What `attend_new` is given in place of this attention, if that is what it is."""
    query, read_keys, read_values, seen, scale = given_to(node, ops.attend.default, 5)
    if query is None:
        return None
    keys, values = _kept(read_keys), _kept(read_values)
    if keys is None or values is None or not keys.across or (keys.at, keys.columns) != (values.at, values.columns):
        return None
    turned = _turned(query, ops), _turned(keys.new, ops)
    if turned[0] is None or turned[1] is None or turned[0].angles != turned[1].angles:
        return None
    norms = _norms(turned[0].norm, turned[1].norm)
    parts = [*(_heads(part.x, part.across) for part in turned if part is not None), _heads(values.new, values.across)]
    if norms is None or any(part is None for part in parts):
        return None
    packed, begins, ends = zip(*(part for part in parts if part is not None), strict=True)
    width = packed[0].meta["val"].shape[-1]
    if len(set(packed)) != 1 or begins != (0, *ends[:-1]) or ends[-1] != width or packed[0].meta["val"].dim() != 3:
        return None
    heads = query.meta["val"].shape[1]
    held = keys.held, values.held
    return packed[0], heads, *norms, *turned[0].angles, *held, keys.at, seen, keys.columns, scale


class _Turned(NamedTuple):
    """Queries or keys that are rotated. x: [R, heads, N, size] if across, else [R, N, heads, size]."""

    x: Node
    across: bool
    norm: tuple[Any, ...]  # weight, eps, more, or nothing
    angles: tuple[Node, Node]


def _turned(node: Any, ops: Any) -> _Turned | None:
    rotated = node
    parts, last = given_to(node, aten.cat.default)
    whole = rest = None
    if isinstance(parts, list | tuple) and len(parts) == 2 and last in (-1, 3):  # the first of their numbers alone
        rotated = parts[0]
        whole, *rest = given_to(parts[1], aten.slice.Tensor, 4)
        if whole is None:
            return None
    x, *angles = given_to(rotated, ops.rotate.default, 3)
    if whole is not None and x is not None:
        size = x.meta["val"].shape[3]
        first = x is whole or given_to(x, aten.slice.Tensor, 4) == (whole, 3, 0, size)
        x = whole if first and rest == [3, size, END] else None
    if x is None or not all(isinstance(angle, Node) for angle in angles):
        return None
    cos_and_sin = (angles[0], angles[1])
    before, *norm = given_to(x, ops.rms_norm.default, 4)
    if before is not None:
        return _Turned(before, True, tuple(norm), cos_and_sin)
    inner, *turned = given_to(x, aten.transpose.int, 3)
    before, *norm = given_to(inner, ops.rms_norm.default, 4)
    if before is not None and turned == [1, 2]:
        return _Turned(before, False, tuple(norm), cos_and_sin)
    return _Turned(x, True, (), cos_and_sin)


def _norms(of_queries: tuple[Any, ...], of_keys: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Their weights, eps and more, if these are the same."""
    eps, more = (of_queries or of_keys or (None, 0.0, 0.0))[1:]
    if any(norm and norm[1:] != (eps, more) for norm in (of_queries, of_keys)):
        return None
    weights = [norm[0] if norm else None for norm in (of_queries, of_keys)]
    return *weights, eps, more


class _Kept(NamedTuple):
    """Keys or values that a pass keeps. held [R, groups, C, size], at [R, N], new [R, groups, N, size] if across, else
    [R, N, groups, size]; columns: read.
    """

    held: Node
    at: Node
    new: Node
    across: bool
    columns: object


def _kept(read: Any) -> _Kept | None:
    """What `tracing.TracedRows` makes of new keys or values that nothing else reads."""
    stored, dim, start, columns = given_to(read, aten.slice.Tensor, 4)
    if (dim, start) != (2, 0):
        return None
    if given_to(stored, aten.slice.Tensor, 4)[1:] == (0, 0, END):  # all rows
        stored = alone(stored) and stored.args[0]
    if not (alone(read) and alone(stored)):
        return None
    held, where, at, new = given_to(stored, aten.index_copy_.default, 4)
    new = _before_cast(new)
    if held is not None:  # of one row
        at, *first = given_to(at, aten.select.int, 3)
        across = True
        fits = where == 2 and first == [0, 0]
    else:
        held, where, new = given_to(stored, aten.index_put_.default, 3)
        new = _before_cast(new)
        each, all_heads, at = where if isinstance(where, list | tuple) and len(where) == 3 else (None, 0, None)
        rows, last = given_to(each, aten.unsqueeze.default)
        inner, *turned = given_to(new, aten.transpose.int, 3)
        across = turned == [1, 2]
        new = inner if across else new
        count = rows.args[0] if isinstance(rows, Node) and rows.target is aten.arange.default else None
        same = isinstance(held, Node) and isinstance(count, Node) and same_size(count.meta["val"], held.meta["val"].shape[0])
        fits = all_heads is None and last == -1 and same
    if not fits or not isinstance(at, Node) or not isinstance(new, Node) or held.op != "placeholder" or not alone(held):
        return None
    types = [new.meta["val"].dtype, at.meta["val"].dtype]
    if types != [torch.float32, torch.int64] or held.meta["val"].dtype not in KEPT or at.meta["val"].dim() != 2:
        return None
    return _Kept(held, at, new, across, columns)


def _before_cast(node: Any) -> Any:
    """What is stored in another type."""
    cast = isinstance(node, Node) and node.target is aten._to_copy.default and set(node.kwargs) == {"dtype"}
    return node.args[0] if cast and alone(node) else node


def _heads(node: Any, across: bool) -> tuple[Node, int, int] | None:
    """x, begin and end of x[.., begin:end] as heads, [R, heads, N, size], or [R, N, heads, size] if not across."""
    flat, *turned = given_to(node, aten.transpose.int, 3)
    if not across:
        flat, turned = node, [1, 2]
    part, shape = given_to(flat, aten.view.default)
    x, dim, begin, end = given_to(part, aten.slice.Tensor, 4)
    if turned != [1, 2] or dim != 2 or len(shape) != 4:
        return None
    heads, size = flat.meta["val"].shape[2:]
    width = x.meta["val"].shape[2]
    if not all(isinstance(number, int) for number in (heads, size, width, begin, end)):
        return None
    return (x, begin, min(end, width)) if heads * size == min(end, width) - begin else None
