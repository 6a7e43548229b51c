"""A pass of tokens as a graph of tensor operations, for any context: how anything here is traced.

A graph must not depend on numbers that change from pass to pass, or each position would need another one. So the cache is
written at positions that are a tensor, and its capacity and the columns that are read are symbols of the graph; the numbers
of tokens and of rows are symbols, too, or fixed. Everything that is read is an input: no weight is copied into the graph,
and what is made of it (`recorded`, `compiled`) can be kept on disk and used by the next process without tracing.

The graph takes `columns`, `capacity`, what the pass is about (tokens, positions), keys and values of each layer [R, heads,
capacity, size], then the parameters, buffers and packed weights (`Parts.inputs`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from outrider.models.attention.shared_keys import WIDEST
from outrider.models.cache.layer import PlacedLayer
from outrider.models.cache.slot_cache import SlotCache, View
from outrider.models.passes.guards import Sizes, check_free, check_guards, symbol
from outrider.models.passes.own_ops import filled, hidden_convolutions, name_own, product_of
from outrider.models.weights.int8_linear import Int8Linear, RowScale
from outrider.models.weights.packed_linear import OpaqueLinear, PackedLinear

if TYPE_CHECKING:
    from torch.fx import GraphModule

STEP = 32  # columns are read in multiples of this, so that kernels for aligned masks fit
# Sizes while tracing: equal to no size of a model, so that none is mistaken.
_COLUMNS, _CAPACITY, _SOURCE, _WIDTH, _ROWS = 11 * STEP, 23 * STEP, 13 * STEP, WIDEST - 3, 19
MOST_VIEWS = 8


@dataclass(frozen=True)
class Parts:
    """What a pass reads beside its row: tensors by name, and layers whose weight has a layout that can't be traced."""

    tensors: dict[str, Tensor]
    packed: tuple[OpaqueLinear, ...]

    @property
    def inputs(self) -> list[Any]:
        return [*self.tensors.values(), *(layer._packed for layer in self.packed)]

    def describe(self) -> list[object]:
        """What a graph's kernels depend on."""
        plain = [(name, tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for name, t in self.tensors.items()]
        return [plain, [(layer.extra_repr(), str(layer._dtype)) for layer in self.packed]]


def parts_of(module: torch.nn.Module) -> Parts:
    """Of a module as it is now."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return Parts(tensors, tuple(layer for layer in module.modules() if isinstance(layer, OpaqueLinear)))


class Cached(Protocol):
    """A model whose passes read a slot cache."""

    _cache: SlotCache

    @property
    def module(self) -> Any: ...

    def cache_rows(self, slots: slice) -> list[Tensor]: ...


class PassInputs:
    """What the passes of a model read in the order of a graph's inputs, the rows at hand looked up once (`SlotCache.views`).

    The model holds whoever has this, and is not held by it: its gigabytes would wait for the next collection of cycles.
    """

    def __init__(self, model: Cached, parts: list[Any] | None = None) -> None:
        self.parts = parts_of(model.module).inputs if parts is None else parts
        self._model = weakref.ref(model)

    def keep_memory(self) -> None:
        """Read the parts where they lie now, also if a parameter is given other memory (`parameter.data = …`)."""
        self.parts = [part.detach() if isinstance(part, Tensor) and not part.is_mkldnn else part for part in self.parts]

    @property
    def slots(self) -> slice:
        """All that the cache has."""
        model = self._model()
        assert model is not None
        return slice(0, model._cache.num_slots)

    def of(self, slots: slice, columns: int) -> tuple[int, list[Any]]:
        """The capacity of the cache, grown to so many columns if it is less, and what is read for these slots' rows."""
        capacity, view = self.view(slots, columns)
        return capacity, [*view.rows, *self.parts]

    def view(self, slots: slice, columns: int) -> tuple[int, View]:
        """The same, the model's parts left out."""
        model = self._model()
        assert model is not None
        cache = model._cache
        cache.reserve(1, columns)
        view = cache.views.get((slots.start, slots.stop))
        if view is None:
            if len(cache.views) >= MOST_VIEWS:
                cache.views.pop(next(iter(cache.views)))
            view = cache.views[slots.start, slots.stop] = View(model.cache_rows(slots))
        return cache.capacity, view


@dataclass(frozen=True)
class Traced:
    """A graph, the stand-ins of its inputs, and the mode that they belong to."""

    graph: GraphModule
    inputs: list[Any]
    mode: Any


class TracedRows(PlacedLayer):
    """A layer's keys and values while a pass is traced or captured."""

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor, columns: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._at, self._columns = at, columns
        self.is_initialized = True

    @property
    def columns(self) -> int:
        return self._columns

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Write at the positions; → the columns that are read, [R, heads, columns, size]."""
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, held: Tensor, states: Tensor) -> Tensor:
        rows: Any = held.shape[0]  # a symbol of the graph where it is not fixed
        if isinstance(rows, int) and rows == 1:  # by columns, several times quicker
            held.index_copy_(2, self._at[0], states.to(held.dtype))
        else:
            each = torch.arange(rows, device=held.device).unsqueeze(-1)
            held[each, :, self._at] = states.transpose(1, 2).to(held.dtype)
        return held[:, :, : self._columns]


@dataclass(frozen=True)
class Inputs:
    """What a traced function is called with."""

    columns: int
    about: Sequence[Tensor]
    rows: Sequence[Tensor]
    tensors: dict[str, Tensor]

    def layers(self, at: Tensor) -> list[TracedRows]:
        """The cache of each layer, written at int64 [R, N] positions."""
        return [TracedRows(self.rows[i], self.rows[i + 1], at, self.columns) for i in range(0, len(self.rows), 2)]


def trace(
    function: Callable[[Inputs], tuple[Tensor, ...]],
    about: Callable[[Sizes], list[Tensor]],
    model: Cached,
    width: int | None,
    several: bool = False,
    fills: bool = True,
) -> Traced:
    """A function of `width` tokens a row, None for any number up to `WIDEST`.

    about: makes what the pass is about, tensors without values. several: of any number of rows, one otherwise. fills: few
    rows are filled up as they are in ordinary passes (`packed_linear.PackedLinear.filled`).
    Raises whatever the model's code raises where it can't be traced.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    mode.cache_enabled = False  # small models are traced sooner without, large ones as soon
    parts, held = parts_of(model.module), model.cache_rows(slice(0, 1))
    columns, capacity = symbol(shapes, "columns", _COLUMNS), symbol(shapes, "capacity", _CAPACITY)
    tokens = symbol(shapes, "width", _WIDTH) if width is None else width
    rows = symbol(shapes, "rows", _ROWS) if several else 1
    source = symbol(shapes, "source", _SOURCE)
    with mode:
        leading = about(Sizes(rows, tokens, source))
        inputs = [columns, capacity, *leading, *_stand_ins(held, parts, rows, capacity)]
    with mode, torch.no_grad(), enable_python_dispatcher(), _as_it_was(model.module), hidden_convolutions():
        # Compiled passes have other bits anyway.
        graph = make_fx(_flat(function, parts, len(leading), len(held), fills))(*inputs)
    name_own(graph)
    check_free(shapes)
    check_guards(shapes, columns, capacity, Sizes(rows, tokens, source))
    return Traced(graph, inputs, mode)


def _flat(function: Callable[[Inputs], tuple[Tensor, ...]], parts: Parts, about: int, held: int, fills: bool) -> Any:
    """The function of a list of inputs, with stand-ins for packed weights meanwhile. fills: few rows are filled up."""
    names = list(parts.tensors)

    def run(columns: int, capacity: int, *flat: Tensor) -> tuple[Tensor, ...]:
        del capacity
        tensors = flat[about + held : about + held + len(names)]
        scales = RowScale()
        for layer, weight in zip(parts.packed, flat[about + held + len(names) :], strict=True):
            layer._packed = weight
            if isinstance(layer, Int8Linear):
                layer._rows, layer._product = scales, product_of(layer)  # type: ignore[method-assign,assignment]
            elif isinstance(layer, PackedLinear):
                layer.filled = partial(filled, layer) if fills else layer.product  # type: ignore[method-assign]
        given = dict(zip(names, tensors, strict=True))
        return function(Inputs(columns, flat[:about], flat[about : about + held], given))

    return run


def _stand_ins(held: list[Tensor], parts: Parts, rows: Any, capacity: Any) -> list[Tensor]:
    """Tensors without values for what is read; to be called in the mode that makes such."""
    device = next(iter(parts.tensors.values())).device
    cache = [torch.empty(rows, t.shape[1], capacity, t.shape[3], dtype=t.dtype, device=device) for t in held]
    tensors = [_stand_in(tensor) for tensor in parts.tensors.values()]
    packed = [torch.empty(p.out_features, p.in_features, dtype=p._dtype, device=device) for p in parts.packed]
    return [*cache, *tensors, *packed]


def _stand_in(tensor: Tensor) -> Tensor:
    """It asks for gradients as the tensor does: by that torch decides how it multiplies several rows with a matrix."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like.requires_grad_(tensor.requires_grad)


@contextmanager
def _as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Whatever tracing sets on the modules is undone: stand-ins must not stay, wherever a model keeps them."""
    before = [(part, dict(part.__dict__)) for part in module.modules()]
    try:
        yield
    finally:
        for part, held in before:
            part.__dict__.clear()
            part.__dict__.update(held)
