"""A loaded model in 8 or 4 bits: its linear layers, its token table, and an attention that does not depend on the width.

Which kernels multiply is settled here: our own where they can be built, oneDNN's for large layers where the processor has
tiles of integers, else torch's in 8 bits; there are no others in 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.models import Kernels, kernels
from outrider.models.attention.in_blocks import use_block_attention
from outrider.models.attention.in_float64 import use_steady_attention
from outrider.models.kernels.attention import use_kernel_attention
from outrider.models.kernels.rows import replace_rows
from outrider.models.weights.int8_linear import Int8Linear, RowScale, largest_weight, suits_tiles
from outrider.models.weights.k_quants import KQuants
from outrider.models.weights.kernel_linear import Int4Kernel, Int8Kernel, KQuantKernel
from outrider.models.weights.packed_linear import OpaqueLinear, plain_weight, replace_linears

ROWS_TRIED = 64  # of a matrix, to see whether it was in 4 bits before
NEAR = 0.005  # what 4 bits that are found again differ by: a number's rounding to bfloat16


class Int8Embedding(nn.Module):
    """A table of rows in 8 bits, a scale per row. ids [..] → [.., size]"""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        scale = weight.detach().float().abs().amax(1, keepdim=True).clamp_min(1e-30) / 127.0
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("rows", (weight.detach().float() / scale).round_().to(torch.int8), persistent=False)
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """Shape and type of the table, without its values."""
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self._dtype, device="meta")

    def forward(self, ids: Tensor) -> Tensor:
        rows, scale = self.get_buffer("rows"), self.get_buffer("scale")
        ours = kernels() if rows.device.type == "cpu" else None
        found: Tensor = rows[ids].float() * scale[ids] if ours is None else ours.ops.rows_int8(rows, scale, ids)
        return found.to(self._dtype)


def can_quantize(bits: int = 8) -> bool:
    """Whether this machine has kernels for weights of 8 or 4 bits. Takes seconds the first time."""
    return kernels() is not None or (bits == 8 and largest_weight() is not None)


def quantized_by() -> str:
    """Which kernels quantized models run on here: what passes cost depends on it."""
    ours = kernels()
    return "torch's kernels" if ours is None else f"our kernels {ours.digest}"


def quantization_of(layers: Iterable[nn.Module]) -> str | None:
    """What most of the weights of these layers were rounded to, "int8" or "int4"; None if none were."""
    counts: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer, OpaqueLinear) and layer.quantization is not None:
            counts[layer.quantization] = counts.get(layer.quantization, 0) + layer.out_features * layer.in_features
    return max(counts, key=lambda name: counts[name]) if counts else None


def quantize_to_int8(module: nn.Module) -> int:
    """Replace the linear layers, the token table and the attention of a loaded model in place; → how many layers.

    Position tables stay as they are: they are small, and added to everything.
    """
    return _quantize(module, _int8_maker())


def quantize_to_int4(module: Any, file: KQuants | None = None) -> int:
    """The same in 4 bits; the token table and the head, which every token passes through, in 8.

    If most weights were in 4 bits before (a GGUF file's), those that were not are left in 8, too: whoever made the file
    held them to be worth more. file: what has them as they were, so that they need not be quantized again.
    """
    ours = kernels()
    assert ours is not None, "where `can_quantize(4)` says no, there are none"
    head = getattr(module.get_output_embeddings(), "weight", None)
    wide = _int8_maker()
    finer = _mostly_in_4_bits(module, head, ours)

    def make(weight: Tensor, bias: Tensor | None) -> OpaqueLinear:
        raw = None if file is None or not (finer or weight is head) else file.of(weight)
        if raw is not None:
            return KQuantKernel(weight, raw, bias, ours)
        eight = weight is head or (finer and not _in_4_bits(weight, ours))
        layer = None if eight else Int4Kernel(weight, bias, ours)
        return layer if layer is not None and layer.found else wide(weight, bias)

    return _quantize(module, make)


def quantize_linears(module: nn.Module) -> int:
    """Replace the linear layers alone, in 8 bits, and what stands between them; → how many linear layers."""
    ours = kernels()
    if ours is not None:
        replace_rows(module, ours)
    return replace_linears(module, _int8_maker())


def _int8_maker() -> Callable[[Tensor, Tensor | None], OpaqueLinear]:
    """What makes an 8-bit layer of a weight and a bias. Those of one maker share quantized activations where they can."""
    ours, rows = kernels(), RowScale()

    def make(weight: Tensor, bias: Tensor | None) -> OpaqueLinear:
        if ours is None or suits_tiles(weight):
            return Int8Linear(weight, bias, rows)
        return Int8Kernel(weight, bias, ours)

    return make


def _quantize(module: Any, make: Callable[[Tensor, Tensor | None], OpaqueLinear]) -> int:
    ours, first = kernels(), next(module.parameters())
    if ours is not None:
        replace_rows(module, ours)
    if (ours is None or not use_kernel_attention(module)) and not use_block_attention(module):
        use_steady_attention(module)
    with torch.inference_mode():
        count = replace_linears(module, make)
    table = module.get_input_embeddings()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child is table and type(child) is nn.Embedding:
                setattr(parent, name, Int8Embedding(child.weight, child.weight.dtype))
                count += 1
    _let_go_of_files(module)
    if next(module.parameters(), None) is None:  # norms without weights: a model's type and device are its parameters'
        module.register_parameter("unquantized", nn.Parameter(first.new_empty(0), requires_grad=False))
    return count


@torch.no_grad()
def _let_go_of_files(module: nn.Module) -> None:
    """Copy what is left of the weights: a norm that lies in a checkpoint's file keeps gigabytes of it mapped."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.clone()


def _mostly_in_4_bits(module: nn.Module, head: Tensor | None, ours: Kernels) -> bool:
    """Whether most weights of the linear layers, the head's apart, were in 4 bits before."""
    weights = [weight for layer in module.modules() if (weight := plain_weight(layer)) is not None and weight is not head]
    return 2 * sum(w.numel() for w in weights if _in_4_bits(w, ours)) > sum(w.numel() for w in weights)


@torch.inference_mode()
def _in_4_bits(weight: Tensor, ours: Kernels) -> bool:
    """Whether a matrix [out, in] was in 4 bits before, by some of its rows."""
    rows = weight[:: max(1, len(weight) // ROWS_TRIED)].float().contiguous()
    _, errors = ours.ops.pack_int4(rows)
    return float(errors.sum()) <= NEAR**2 * float(rows.square().sum())
