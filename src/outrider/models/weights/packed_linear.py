"""Linear layers with weights laid out for the CPU's matrix kernels, once, when a model is loaded.

torch hands oneDNN plain row-major weights, and oneDNN reorders them inside every call: with a few tokens a pass that costs
more than the product. Reordered in advance the same product reaches the memory's bandwidth, and scoring several tokens
costs little more than scoring one, which is what speculation lives on. The results of bfloat16 layers were the same to the
bit wherever it was tried, those of float32 layers are to rounding. Only models that Outrider has loaded itself are changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.errors import ParameterError
from outrider.models.weights.side_by_side import groups_of, put_together

ROWS_HINT = 4  # the layout that suited 1 … 16 rows best (EXPERIMENTS.md)
_DTYPES = (torch.bfloat16, torch.float32)


class OpaqueLinear(nn.Module):
    """A linear layer whose weight is in a kernel's own layout, `_packed`: it can't be saved or moved; a copy shares it."""

    _packed: Any
    bytes_per_weight: float
    quantization: str | None = None  # "int8", "int6", "int4": of weights that were quantized

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._dtype = weight.dtype
        self.bytes_per_weight = weight.element_size()

    @property
    def weight(self) -> Tensor:
        """Shape and type of the weight, without its values: some models look at the type.

        Made in inference mode, so that whoever wants to write into it is told that he can't.
        """
        with torch.inference_mode():
            return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy shares the weight, which is never written again (and torch can't copy its layout)."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(self.__dict__)
        return copied

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def check_readable(module: nn.Module, what: str) -> None:
    """Raise `ParameterError` if weights of a model lie in a kernel's layout."""
    if any(isinstance(part, OpaqueLinear) for part in module.modules()):
        raise ParameterError(
            f"{what} must be a model whose weights can be read: load it with pack=False, and not in int8 or int4"
        )


def bytes_of(layers: Iterable[nn.Module]) -> int:
    """Bytes of the weights that these layers hold themselves, those of their parts left out; of sharded ones this rank's."""
    total = 0.0
    for layer in layers:
        if isinstance(layer, OpaqueLinear):
            total += layer.out_features * layer.in_features * layer.bytes_per_weight
        else:
            total += sum(local(p).numel() * p.element_size() for p in layer.parameters(recurse=False))
    return round(total)


def local(tensor: Any) -> Any:
    """This rank's share of a sharded tensor; any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class PackedLinear(OpaqueLinear):
    """x → x · weightᵀ + bias, the weight in oneDNN's own layout. [.., in] → [.., out]

    fill: fewer rows than these are filled up to them, whose kernel may add up otherwise (`same_bits`).
    """

    fill = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if self.fill == 1 else self.filled(x)

    def product(self, x: Tensor) -> Tensor:
        """Of the rows that there are; under autocast these may be of another type, which the weight can't follow."""
        x = x if x.dtype is self._dtype else x.to(self._dtype)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(*packed_arguments(x, self._packed, self.bias))
        return out

    def filled(self, x: Tensor) -> Tensor:
        """Of `fill` rows at least."""
        rows = x.numel() // self.in_features
        if rows >= self.fill:
            return self.product(x)
        out = self.product(nn.functional.pad(x.reshape(rows, self.in_features), (0, 0, 0, self.fill - rows)))
        return out[:rows].view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.fill == 1 else f", fill={self.fill}")


def packed_arguments(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    """What oneDNN's kernel is called with, or what stands for it in a graph."""
    return x, weight, bias, "none", [], ""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch and this processor have such kernels, tried on a small layer."""
    if device.type != "cpu" or dtype not in _DTYPES or not torch._C._has_mkldnn:
        return False
    try:
        weight = torch.eye(32, 64, dtype=dtype)
        x = torch.arange(128, dtype=dtype).reshape(2, 64)
        with torch.inference_mode():
            return torch.equal(PackedLinear(weight, None)(x), nn.functional.linear(x, weight))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def pack_linears(module: nn.Module) -> int:
    """Replace the linear layers of a loaded model in place; → how many. Does nothing where `can_pack` says no."""
    first = next(module.parameters())
    if not can_pack(first.dtype, first.device):
        return 0
    with torch.inference_mode():
        return replace_linears(module, PackedLinear)


def plain_weight(child: nn.Module) -> Tensor | None:
    """The [out, in] weight of a layer that can be replaced. Subclasses may compute something else and are left alone."""
    from transformers.pytorch_utils import Conv1D

    if type(child) is nn.Linear and child.weight.dtype in _DTYPES:
        return child.weight
    if type(child) is Conv1D:  # GPT-2 stores the transpose
        transposed: Any = child.weight
        return transposed.t().contiguous()  # type: ignore[no-any-return]
    return None


_READ = re.compile(r"self\.(\w+)\.weight\s*@|@\s*self\.(\w+)\.weight\b|linear\([^()]*self\.(\w+)\.weight\b")


@cache
def reads_weights(kind: Any) -> frozenset[str]:
    """The children whose weights the code of a kind of module multiplies with itself, instead of calling them (Mamba).

    Of a weight that was laid out anew only shape and type are there to be read.
    """
    try:
        code = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return frozenset()
    return frozenset(name for found in _READ.findall(code) for name in found if name)


def replace_linears(module: nn.Module, make: Callable[[Tensor, Tensor | None], OpaqueLinear]) -> int:
    """Replace the linear layers of a model in place by what is made of weight [out, in] and bias; → how many there were.

    Layers side by side become one (`side_by_side`), but for encoder-decoders, whose attention to the source has other inputs
    for keys and values.
    """
    apart = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    count = 0
    for parent in list(module.modules()):
        found = {name: child for name, child in parent.named_children() if plain_weight(child) is not None}
        kind: Any = type(parent)
        for name in reads_weights(kind):
            found.pop(name, None)
        for names in [] if apart else groups_of(found):
            weights = [plain_weight(found[name]) for name in names]
            biases: list[Any] = [found.pop(name).bias for name in names]
            whole = make(torch.cat([w for w in weights if w is not None]), None if biases[0] is None else torch.cat(biases))
            put_together(parent, names, [len(w) for w in weights if w is not None], whole)
            count += len(names)
        for name, child in found.items():
            weight, bias = plain_weight(child), child.bias
            assert weight is not None
            setattr(parent, name, make(weight, bias))  # type: ignore[arg-type]
            count += 1
    return count
