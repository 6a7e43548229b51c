"""A pass of tokens as a graph of tensor operations, for any context: how anything here is traced.

A graph must not depend on numbers that change from pass to pass, or each position would need another one. So the cache is
written at positions that are a tensor, and its capacity and the columns that are read are symbols of the graph; the numbers
of tokens and of rows are symbols, too, or fixed. Everything that is read is an input: no weight is copied into the graph,
and what is made of it (`recorded`, `compiled`) can be kept on disk and used by the next process without tracing.

The graph takes `columns`, `capacity`, what the pass is about (tokens, positions), keys and values of each layer [R, heads,
capacity, size], then the parameters, buffers and packed weights (`Parts.inputs`).
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from outrider.models.attention.shared_keys import WIDEST
from outrider.models.cache.slot_cache import SlotCache, View
from outrider.models.weights.int8_linear import Int8Linear, RowScale
from outrider.models.weights.packed_linear import OpaqueLinear, PackedLinear, packed_arguments

if TYPE_CHECKING:
    from torch.fx import GraphModule

STEP = 32  # columns are read in multiples of this, so that kernels for aligned masks fit
# Sizes while tracing: equal to no size of a model, so that none is mistaken.
_COLUMNS, _CAPACITY, _SOURCE, _WIDTH, _ROWS = 11 * STEP, 23 * STEP, 13 * STEP, WIDEST - 3, 19
MOST_VIEWS = 8
_torch_library: Any = torch.library  # parts of which have no types
_library = _torch_library.Library("outrider", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define("filled_linear(Tensor x, Tensor weight, Tensor? bias, int fill) -> Tensor")
_library.define("int8_product(Tensor x, Tensor weight) -> Tensor")
_library.define("int8_tiles(Tensor x, Tensor weight, Tensor scales, Tensor zeros) -> Tensor")


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(*packed_arguments(x, weight, bias))
    return out


def _packed_shape(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    del others
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _product_shape(x: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
    del scales
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("outrider::packed_linear", _packed_shape, lib=_library)
torch.library.register_fake("outrider::filled_linear", _packed_shape, lib=_library)
torch.library.register_fake("outrider::int8_product", _product_shape, lib=_library)
torch.library.register_fake("outrider::int8_tiles", _product_shape, lib=_library)


class DecidesError(RuntimeError):
    """The code of a model does other things for other sizes."""


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
        plain = [(name, tuple(t.shape), t.stride(), str(t.dtype)) for name, t in self.tensors.items()]
        return [plain, [(layer.extra_repr(), str(layer._dtype)) for layer in self.packed]]


def parts_of(module: torch.nn.Module) -> Parts:
    """Of a module as it is now."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return Parts(tensors, tuple(layer for layer in module.modules() if isinstance(layer, OpaqueLinear)))


def versions() -> tuple[str, ...]:
    """Of what a graph is traced from."""
    import transformers

    import outrider

    return outrider.__version__, torch.__version__, transformers.__version__


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


class TracedRows(CacheLayerMixin):  # type: ignore[misc]
    """A layer's keys and values while a pass is traced or captured. Follows transformers' cache-layer interface."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor, columns: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._at, self._columns = at, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make."""

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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self._columns, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@dataclass(frozen=True)
class Sizes:
    """Of a traced pass, numbers or symbols. source: the longest source of an encoder-decoder's rows."""

    rows: Any
    tokens: Any
    source: Any


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
) -> Traced:
    """A function of `width` tokens a row, None for any number up to `WIDEST`.

    about: makes what the pass is about, tensors without values. several: of any number of rows, one otherwise.
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
    columns, capacity = _symbol(shapes, "columns", _COLUMNS), _symbol(shapes, "capacity", _CAPACITY)
    tokens = _symbol(shapes, "width", _WIDTH) if width is None else width
    rows = _symbol(shapes, "rows", _ROWS) if several else 1
    source = _symbol(shapes, "source", _SOURCE)
    with mode:
        leading = about(Sizes(rows, tokens, source))
        inputs = [columns, capacity, *leading, *_stand_ins(held, parts, rows, capacity)]
    with mode, torch.no_grad(), enable_python_dispatcher(), _as_it_was(model.module):
        # Compiled passes have other bits anyway.
        graph = make_fx(_flat(function, parts, len(leading), len(held), fills=width is None))(*inputs)
    _name_packed(graph)
    check_free(shapes)
    _check_guards(shapes, columns, capacity, Sizes(rows, tokens, source))
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
                layer._rows, layer._product = scales, _product_of(layer)  # type: ignore[method-assign,assignment]
            elif isinstance(layer, PackedLinear):
                layer.filled = partial(_filled, layer) if fills else layer.product  # type: ignore[method-assign]
        given = dict(zip(names, tensors, strict=True))
        return function(Inputs(columns, flat[:about], flat[about : about + held], given))

    return run


def _filled(layer: PackedLinear, x: Tensor) -> Tensor:
    """What stands for it in a graph, which asks for the number of rows in each pass."""
    out: Tensor = torch.ops.outrider.filled_linear(x, layer._packed, layer.bias, layer.fill)
    return out


def _product_of(layer: Int8Linear) -> Callable[[Tensor], Tensor]:
    """What can be traced in place of a kernel whose weight is no tensor, or no ordinary one."""
    if layer.tiles:
        return lambda x: torch.ops.outrider.int8_tiles(x, layer._packed, layer.scales, layer.zeros)
    return lambda x: torch.ops.outrider.int8_product(x, layer._packed)


def check_free(shapes: Any) -> None:
    """Raise if the graph holds for some contexts only: a symbol was replaced by a number on the way."""
    fixed = {symbol: value for symbol, value in shapes.replacements.items() if not value.free_symbols}
    if fixed:
        raise DecidesError(f"its pass depends on the length of the context: {fixed}")


def _check_guards(shapes: Any, columns: Any, capacity: Any, of: Sizes) -> None:
    """Raise if the model's code took a decision by one of the sizes that is another one for other sizes.

    Each decision about one size is tried for every small one and some large ones, others by corners and at random. Sizes of
    1 apart, for which everything is contiguous: that changes what is copied. Whether it changes what is computed, passes
    tell (`recorded`).
    """
    about = ((of.rows, _SIZES), (of.tokens, _WIDTHS), (columns, _SIZES), (capacity, _SIZES), (of.source, _SIZES))
    alone = {size.node.expr: all_of_it for size, all_of_it in about if not isinstance(size, int)}
    for decision in {guard.expr for guard in shapes.guards}:
        found = [symbol for symbol in alone if symbol in decision.free_symbols]
        one = found[0] if len(found) == 1 else None
        tried = _several_sizes(columns, capacity, of) if one is None else ({one: size} for size in alone[one])
        if any(decision.subs(sizes) != True for sizes in tried):  # noqa: E712 - of a computer algebra
            raise DecidesError(f"its pass depends on sizes: {decision}")


_WIDTHS = range(2, WIDEST + 1)
_LARGE = [size + more for size in (128, 256, 512, 1024, 4096, 1 << 15, 1 << 20) for more in (-1, 0, 1)]
_SIZES = [*_WIDTHS, *_LARGE]


def _several_sizes(columns: Any, capacity: Any, of: Sizes) -> Iterator[dict[Any, int]]:
    """Sizes that can come together."""
    corners = [*product((WIDEST, 1 << 20), (2, 1 << 10), (2, WIDEST), (2, 1 << 15))]
    draw = random.Random(0)
    some = [(draw.choice(_LARGE), draw.randint(2, 70), draw.choice(_WIDTHS), draw.choice(_SIZES)) for _ in range(60)]
    for most, high, wide, far in (*corners, *some):
        sizes = ((columns, most), (capacity, 2 * most + 1), (of.rows, high), (of.tokens, wide), (of.source, far))
        yield {symbol.node.expr: size for symbol, size in sizes if not isinstance(symbol, int)}


def _symbol(shapes: Any, name: str, size: int) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shapes.create_symbol(size, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=size, source=source)


def _stand_ins(held: list[Tensor], parts: Parts, rows: Any, capacity: Any) -> list[Tensor]:
    """Tensors without values for what is read; to be called in the mode that makes such."""
    device = held[0].device
    cache = [torch.empty(rows, t.shape[1], capacity, t.shape[3], dtype=t.dtype, device=device) for t in held]
    tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in parts.tensors.values()]
    packed = [torch.empty(p.out_features, p.in_features, dtype=p._dtype, device=device) for p in parts.packed]
    return [*cache, *tensors, *packed]


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


def _name_packed(graph: GraphModule) -> None:
    """Let the graph name our own operation: the compiler takes torch's only for weights that are constants."""
    op = torch.ops.mkldnn._linear_pointwise.default if torch._C._has_mkldnn else None
    for node in graph.graph.nodes:
        if op is not None and node.op == "call_function" and node.target is op:
            node.target = torch.ops.outrider.packed_linear.default
            node.args = node.args[:3]
    graph.recompile()


def lower_packed() -> None:
    """Tell the compiler to call torch's operation for ours directly, which saves a detour through Python a layer."""
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.mkldnn_ir import LinearUnary

    op, call = torch.ops.outrider.packed_linear.default, cast(Any, LinearUnary.create)
    if op in lowerings:
        return

    @register_lowering(op, type_promotion_kind=None)
    def lower(x: Any, weight: Any, bias: Any) -> Any:
        return TensorBox.create(call(x, weight, bias, "none", [], ""))
