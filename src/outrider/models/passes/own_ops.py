"""Operations of ours in a graph: for products with packed weights, which are no ordinary tensors, and for convolutions.

`packed_linear` is torch's own operation; the others are written out as what they stand for (`graph_text`). A convolution is
its own again once a graph is made: it is hidden meanwhile because torch looks for the kernel that it would take, which may
depend on the number of rows, while the graph looks for it in each pass anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from outrider.models.weights.int8_linear import Int8Linear
from outrider.models.weights.packed_linear import PackedLinear, packed_arguments

if TYPE_CHECKING:
    from torch.fx import GraphModule

_torch_library: Any = torch.library  # parts of which have no types
_library = _torch_library.Library("outrider", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define("filled_linear(Tensor x, Tensor weight, Tensor? bias, int fill) -> Tensor")
_library.define("int8_product(Tensor x, Tensor weight) -> Tensor")
_library.define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int stride, int pad, int dilation, int groups) -> Tensor"
)
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


def _convolved_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: int, dilation: int, groups: int
) -> Tensor:
    del bias, groups
    length = (x.shape[2] + 2 * pad - dilation * (weight.shape[2] - 1) - 1) // stride + 1
    return x.new_empty((x.shape[0], weight.shape[0], length))


_library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("outrider::packed_linear", _packed_shape, lib=_library)
torch.library.register_fake("outrider::filled_linear", _packed_shape, lib=_library)
torch.library.register_fake("outrider::int8_product", _product_shape, lib=_library)
torch.library.register_fake("outrider::int8_tiles", _product_shape, lib=_library)
torch.library.register_fake("outrider::convolution", _convolved_shape, lib=_library)


def filled(layer: PackedLinear, x: Tensor) -> Tensor:
    """What stands for it in a graph, which asks for the number of rows in each pass."""
    out: Tensor = torch.ops.outrider.filled_linear(x, layer._packed, layer.bias, layer.fill)
    return out


def product_of(layer: Int8Linear) -> Callable[[Tensor], Tensor]:
    """What can be traced in place of a kernel whose weight is no tensor, or no ordinary one."""
    if layer.tiles:
        return lambda x: torch.ops.outrider.int8_tiles(x, layer._packed, layer.scales, layer.zeros)
    return lambda x: torch.ops.outrider.int8_product(x, layer._packed)


@contextmanager
def hidden_convolutions() -> Iterator[None]:
    """Meanwhile a convolution over one dimension of what has no values, as in a trace, is an operation of ours."""
    place: Any = functional
    plain = place.conv1d

    def conv1d(x: Tensor, weight: Tensor, *more: Any, **named: Any) -> Any:
        bias, *numbers = _settings(*more, **named)
        if not isinstance(x, FakeTensor) or x.dim() != 3 or None in numbers:
            return plain(x, weight, *more, **named)
        return torch.ops.outrider.convolution(x, weight, bias, *numbers)

    place.conv1d = conv1d
    try:
        yield
    finally:
        place.conv1d = plain


def _settings(
    bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> tuple[Tensor | None, int | None, int | None, int | None, int | None]:
    """As `conv1d` takes them: numbers of the one dimension, None for what is none."""
    return bias, _number(stride), _number(padding), _number(dilation), groups


def _number(value: Any) -> int | None:
    one = value[0] if isinstance(value, tuple | list) and len(value) == 1 else value
    return one if isinstance(one, int) else None


def name_own(graph: GraphModule) -> None:
    """Let the graph name our own product, since the compiler takes torch's only for weights that are constants, and torch's
    own convolution.
    """
    op = torch.ops.mkldnn._linear_pointwise.default if torch._C._has_mkldnn else None
    for node in graph.graph.nodes:
        if op is not None and node.op == "call_function" and node.target is op:
            node.target = torch.ops.outrider.packed_linear.default
            node.args = node.args[:3]
        if node.op == "call_function" and node.target is torch.ops.outrider.convolution.default:
            node.target = torch.ops.aten.convolution.default
            x, weight, bias, stride, padding, dilation, groups = node.args
            node.args = (x, weight, bias, [stride], [padding], [dilation], False, [0], groups)
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
