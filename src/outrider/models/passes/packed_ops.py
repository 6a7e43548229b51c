"""Operations that stand in a graph for products with packed weights, which are no ordinary tensors.

`packed_linear` is torch's own operation; the others are written out as what they stand for (`graph_text`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from outrider.models.weights.int8_linear import Int8Linear
from outrider.models.weights.packed_linear import PackedLinear, packed_arguments

if TYPE_CHECKING:
    from torch.fx import GraphModule

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


def filled(layer: PackedLinear, x: Tensor) -> Tensor:
    """What stands for it in a graph, which asks for the number of rows in each pass."""
    out: Tensor = torch.ops.outrider.filled_linear(x, layer._packed, layer.bias, layer.fill)
    return out


def product_of(layer: Int8Linear) -> Callable[[Tensor], Tensor]:
    """What can be traced in place of a kernel whose weight is no tensor, or no ordinary one."""
    if layer.tiles:
        return lambda x: torch.ops.outrider.int8_tiles(x, layer._packed, layer.scales, layer.zeros)
    return lambda x: torch.ops.outrider.int8_product(x, layer._packed)


def name_packed(graph: GraphModule) -> None:
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
