"""Operations of ours that follow each other as one: a call of the interpreter costs tens of microseconds beside weights that
sweep the caches, and a chain is one call (`chain.cpp`).

Two operations stand for it: `chain_plan` reads the weights and where keys and values are kept, which is the same in each
pass (`planned` calls it once), and `chain` what differs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from outrider.models.kernels.fusing.parts import alone, aten, given_to, makes_its_own, same_size, schema_of

if TYPE_CHECKING:
    from torch.fx import GraphModule

LAYER, ATTENTION, NORM, ADD, EMBED, JOIN, PLACED, LAST = range(8)  # of a step, as `chain_plan.h` has them
UNLIMITED = 2**63 - 1  # the largest position, where none is
NONE = -1
_INPUTS = ("placeholder", "get_attr")


@dataclass(frozen=True)
class _Kept:
    """A tensor that is the same in each pass."""

    node: Node


@dataclass
class _Step:
    """kind, activations that are read, what follows the first of them in the order of `chain_plan.h` (`rest`), numbers;
    columns: that attention reads.
    """

    kind: int
    reads: tuple[Node, ...]
    rest: tuple[Node | _Kept | int | None, ...]
    numbers: tuple[float, ...] = ()
    columns: tuple[Any, ...] = ()

    @property
    def given(self) -> set[Node]:
        """What differs from pass to pass and is no activation: it can't be a result of the same chain."""
        return {each for each in self.rest if isinstance(each, Node)} - set(self.reads)

    @property
    def plannable(self) -> bool:
        """Whether all that should not differ from pass to pass is an input of the graph, and widths are numbers."""
        kept = all(each.node.op in _INPUTS for each in self.rest if isinstance(each, _Kept))
        return kept and all(isinstance(_width(each), int) for each in self.reads)


def fuse_chains(graph: GraphModule, ops: Any) -> None:
    """Make one `chain` of each row of steps between which nothing else is computed from their results."""
    for members in reversed(list(_chains(graph, ops))):  # those before are read by those behind, which know them as they are
        kept = any(isinstance(each, _Kept) for step in members.values() for each in step.rest)
        if len(members) > 1 and kept:  # sums alone have nothing to plan
            _put_together(graph, ops, members)


def _chains(graph: GraphModule, ops: Any) -> Iterator[dict[Node, _Step]]:
    """Steps that can be one call, in order: what stands between them does not depend on them."""
    members: dict[Node, _Step] = {}
    after: set[Node] = set()
    last: set[Node] = set()  # of them, those that are of the last tokens alone
    for node in graph.graph.nodes:
        step = _step(node, ops)
        depends = not after.isdisjoint(node.all_input_nodes) or (
            step is not None and not members.keys().isdisjoint(step.given)
        )
        if step is not None and not depends and _fits(node, step, members, last):
            members[node] = step
            if step.kind == LAST or not last.isdisjoint(step.reads):
                last.add(node)
        elif step is not None and _fits(node, step, {}, set()):
            yield members
            members, after, last = {node: step}, set(), {node} if step.kind == LAST else set()
        elif _writes_into_what_is_read(node):  # nothing that reads it may move past it
            yield members
            members, after, last = {}, set(), set()
        elif depends or not members.keys().isdisjoint(node.all_input_nodes):
            after.add(node)
    yield members


def _step(node: Node, ops: Any) -> _Step | None:
    """What a chain is told of this operation; None if it knows none of its kind."""
    if node.op != "call_function" or (node.kwargs and node.target is not aten._to_copy.default):
        return None
    args: Any = node.args
    layers = {ops.fused_int8.default, ops.fused_grouped.default}
    plain = {ops.linear_int8.default, ops.linear_grouped.default}
    found = None
    if node.target in layers or node.target in plain:
        x, norm, eps, more, gated, added, weight, *scales, bias, outputs = (
            args if node.target in layers else (args[0], None, 0.0, 0.0, False, None, *args[1:])
        )
        rest = (*_kept(norm), int(gated), added, *_kept(weight, *(scales or [None]), bias), outputs)
        found = _Step(LAYER, (x,) if added is None else (x, added), rest, (eps, more))
    elif node.target is ops.attend_new.default:
        found = _attention(args, ops)
    elif node.target is ops.rms_norm.default:
        x, weight, eps, more = args
        found = _Step(NORM, (x,), _kept(weight), (eps, more))
    elif node.target is ops.join.default:
        parts, weights, eps, more, width = args
        pairs = [each for pair in zip(parts, _kept(*weights), strict=True) for each in pair]
        found = _Step(JOIN, tuple(parts), (len(parts), width, *pairs), (eps, more))
    elif (table := _looked_up(node, ops)) is not None:
        found = _Step(EMBED, (), table)
    elif _is_last(node):
        found = _Step(LAST, (args[0],), ())
    elif _is_sum(node):
        found = _Step(ADD, (args[0], args[1]), (args[1],))
    return found if found is not None and found.plannable else None


def _attention(args: Any, ops: Any) -> _Step:
    packed, heads, query_norm, key_norm, eps, more, cos, sin, keys, values, at, seen, columns, scale = args
    rest = (heads, *_kept(query_norm, key_norm, keys, values))
    places = _places_of(cos, sin, at, seen, columns, ops)
    if places is None:
        return _Step(ATTENTION, (packed,), (*rest, cos, sin, at, seen), (eps, more, scale), (columns,))
    frequencies, positions, limit, window, apart, times = places
    about = (*_kept(frequencies), positions, limit, int(apart), window, at)
    return _Step(PLACED, (packed,), (*rest, *about), (eps, more, scale, times), (columns,))


def _places_of(
    cos: Node, sin: Node, at: Node, seen: Any, columns: object, ops: Any
) -> tuple[Node, Node, int, int, bool, float] | None:
    """Frequencies, positions, the largest of these, window, whether tokens are not at their positions, times; None where
    angles and what is seen do not follow from positions.
    """
    angles, which = _of_angles(cos)
    others, other = _of_angles(sin)
    positions, frequencies, times = given_to(angles, ops.angles.default, 3)
    seers, own, read, window = given_to(seen, ops.seen.default, 4)
    if positions is None or angles is not others or (which, other) != (0, 1) or seers is not positions or read != columns:
        return None
    if (own is not None and own is not at) or frequencies.op not in _INPUTS:
        return None
    wide, least, most = given_to(positions, aten.clamp.default, 3)
    limited = wide is not None and least is None and isinstance(most, int)
    x = (wide, most) if limited else (positions, UNLIMITED)
    return frequencies, *x, window, own is not None, times


def _of_angles(node: Any) -> tuple[Any, Any]:
    """What angles these are, and which of the two."""
    inner, dim = given_to(node, aten.unsqueeze.default)
    return given_to(inner, operator.getitem) if dim == 1 else (None, None)


def _looked_up(node: Node, ops: Any) -> tuple[Any, ...] | None:
    """Tokens [R, N], and the table and its scales, of rows in float32."""
    table, scales, tokens = given_to(node, ops.rows_int8.default, 3)
    if table is None:
        cast = node.target is aten._to_copy.default and node.kwargs == {"dtype": torch.float32}
        inner: Any = node.args[0] if cast and alone(node.args[0]) else node
        if getattr(inner, "target", None) is not aten.embedding.default or inner.kwargs:
            return None
        table, tokens, *_ = inner.args
        if table.meta["val"].dtype is not (torch.bfloat16 if cast else torch.float32):
            return None
    fits = tokens.meta["val"].dim() == 2 and tokens.meta["val"].dtype is torch.int64 and table.meta["val"].is_contiguous()
    return (tokens, *_kept(table, scales)) if fits else None


def _kept(*nodes: Node | None) -> tuple[_Kept | None, ...]:
    return tuple(None if node is None else _Kept(node) for node in nodes)


def _width(node: Node) -> Any:
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() else None


def _is_last(node: Node) -> bool:
    """Whether it is the last token of each row, [R, N, W] → [R, 1, W]; of what nothing writes into later, as it will be a
    copy.
    """
    x, dim, begin, end = given_to(node, aten.slice.Tensor, 4)
    return (dim, begin) == (1, -1) and isinstance(end, int) and end >= UNLIMITED and makes_its_own(x)


def _is_sum(node: Node) -> bool:
    """Of two that are as wide."""
    given = given_to(node, aten.add.Tensor)
    if not all(isinstance(each, Node) and isinstance(each.meta.get("val"), torch.Tensor) for each in given):
        return False
    widths = [each.meta["val"].shape[-1:] for each in (*given, node)]
    return same_size(widths[0], widths[1]) and same_size(widths[0], widths[2])


def _writes_into_what_is_read(node: Node) -> bool:
    """Whether something else reads what it changes, and not by its result."""
    schema = schema_of(node)
    if schema is None or not schema.is_mutable:
        return False
    pairs = zip(schema.arguments, node.args, strict=False)
    return not all(alone(into) for each, into in pairs if each.alias_info is not None and each.alias_info.is_write)


def _fits(node: Node, step: _Step, members: dict[Node, _Step], last: set[Node]) -> bool:
    """Whether it is of the tokens of those before it, or of the last ones among these, if what it reads is."""
    if step.kind == LAST and last.isdisjoint(step.reads):
        return _alike([next(iter(members), step.reads[0]), step.reads[0]])
    if not last.isdisjoint(step.reads):
        return step.kind not in (ATTENTION, PLACED) and last.issuperset(step.reads) and _alike([node, *step.reads])
    return _alike([next(iter(members), node), node, *step.reads])


def _alike(nodes: Sequence[Node]) -> bool:
    """Whether all are activations [R, N, any] in float32, of the same rows and tokens."""
    values: list[Any] = [node.meta.get("val") for node in nodes]
    if not all(isinstance(value, torch.Tensor) and value.dim() == 3 and value.dtype is torch.float32 for value in values):
        return False
    return all(same_size(value.shape[i], values[0].shape[i]) for value in values for i in (0, 1))


@dataclass
class _Written:
    """A chain so far. kept, given and counts: {node or number: where it stands}; widths: of what is given, 0 of what is no
    activation.
    """

    places: dict[Node, int]
    kept: dict[Node, int] = field(default_factory=dict)
    given: dict[Node, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    counts: dict[Any, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    def name(self, one: Node | _Kept | int | None, activations: bool) -> int:
        """Of a tensor, a result or none; a whole number is itself."""
        if one is None:
            return NONE
        if isinstance(one, _Kept):
            return self.kept.setdefault(one.node, len(self.kept))
        if not isinstance(one, Node):
            return int(one)
        if one in self.places:
            return -2 - self.places[one]
        width = _width(one)
        one = _before_cast(one) if activations else one
        if one not in self.given:
            self.given[one] = len(self.given)
            self.widths.append(0)
        if activations:
            self.widths[self.given[one]] = width
        return self.given[one]

    def add(self, node: Node, step: _Step) -> None:
        columns = [self.counts.setdefault(each, len(self.counts)) for each in step.columns]
        first = () if step.kind in (EMBED, JOIN) else step.reads[:1]
        names = [self.name(each, each in step.reads) for each in (*first, *step.rest)]
        self.steps += [step.kind, -2 - self.places[node], *names, *columns]
        self.numbers += [float(each) for each in step.numbers]


def _before_cast(node: Node) -> Node:
    """Activations in bfloat16 of what is the same in float32: a chain reads them as they are."""
    wide = node.target is aten._to_copy.default and node.kwargs == {"dtype": torch.float32}
    inner: Any = node.args[0] if wide else node
    return inner if isinstance(inner, Node) and inner.meta["val"].dtype is torch.bfloat16 else node


def _put_together(graph: GraphModule, ops: Any, members: dict[Node, _Step]) -> None:
    returned = [node for node in members if any(user not in members for user in node.users)]
    places = _places(members, returned)
    written = _Written(places)
    for node, step in members.items():
        written.add(node, step)
    first, last = next(iter(members)), next(reversed(members))
    _move_behind(graph, last, members)
    like: Any = (*members[first].reads, *members[first].rest)[0]
    lists = (list(written.kept), written.steps, written.numbers, written.widths)
    with graph.graph.inserting_after(last):
        plan = graph.graph.call_function(ops.chain_plan.default, (*lists, 1 + max(places.values()), len(returned)))
    with graph.graph.inserting_after(plan):
        made = graph.graph.call_function(ops.chain.default, (like, plan, list(written.given), list(written.counts)))
    made.meta["val"] = [node.meta["val"] for node in returned]
    before = made
    for i, node in enumerate(returned):
        with graph.graph.inserting_after(before):
            before = graph.graph.call_function(operator.getitem, (made, i))
        before.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(before, delete_user_cb=lambda user: user not in members)
    for node in reversed(members):
        graph.graph.erase_node(node)


def _places(members: dict[Node, _Step], returned: list[Node]) -> dict[Node, int]:
    """Where each result lies: those that are returned first, the others where none lies that is still to be read."""
    until = {read: node for node, step in members.items() for read in step.reads}
    found = {node: i for i, node in enumerate(returned)}
    free: list[int] = []
    count = len(returned)
    for node, step in members.items():
        if node not in found:
            if not free:
                free, count = [count], count + 1
            found[node] = free.pop()
        done = {read for read in step.reads if until[read] is node and read in members and read not in returned}
        free += [found[read] for read in done]
    return found


def _move_behind(graph: GraphModule, last: Node, members: dict[Node, _Step]) -> None:
    """Put what reads results of these between them behind the last."""
    nodes = list(graph.graph.nodes)
    behind: set[Node] = set()
    at = last
    for node in nodes[nodes.index(next(iter(members))) : nodes.index(last)]:
        reads = node.all_input_nodes
        if node not in members and not (members.keys().isdisjoint(reads) and behind.isdisjoint(reads)):
            behind.add(node)
            at.append(node)
            at = node
