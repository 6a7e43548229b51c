"""Linear layers by our own kernels: weights in 8, 6 or 4 bits; activations in 8, a scale per token and block of columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.models import Kernels
from outrider.models.weights.gguf_tensors import BLOCKS, Q4_K
from outrider.models.weights.packed_linear import OpaqueLinear

OUTPUTS = 16  # of a block


class Int8Kernel(OpaqueLinear):
    """x → x · weightᵀ + bias, both quantized to 8 bits: a scale per output, and per row and 256 columns.
    [.., in] → [.., out], in x's type.

    The weights are those of `Int8Linear` by torch's kernels, which have one scale for all columns of a row.
    """

    quantization = "int8"

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        scales = weight.detach().float().abs().amax(1).double().clamp_min(1e-30) / kernels.largest
        inverse = (1.0 / scales).float().unsqueeze(1)
        self._packed = kernels.ops.pack_int8((weight.detach().float() * inverse).round_().to(torch.int8).contiguous())
        padded = torch.zeros(-(-len(weight) // OUTPUTS) * OUTPUTS, dtype=torch.float32)
        padded[: len(weight)] = scales
        self.register_buffer("scales", padded, persistent=False)
        self._multiply: Any = kernels.ops.linear_int8
        self._level = kernels.level
        self.bytes_per_weight = 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._multiply(x.float(), self._packed, self.scales, self.bias, self.out_features)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quantization} by {self._level}"


class GroupedKernel(OpaqueLinear):
    """x → x · weightᵀ + bias, weights in 4 or 6 bits by groups of columns, activations in 8. [.., in] → [.., out],
    in x's type.

    weight: its shape and type; packed: its values, as the kernels lay them out.
    """

    def __init__(self, weight: Tensor, packed: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        self._packed = packed
        self._multiply: Any = kernels.ops.linear_grouped
        self._level = kernels.level
        self.bytes_per_weight = packed.nbytes / weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:  # of some others the kernels know no better: columns are filled up
            raise RuntimeError(f"activations must have {self.in_features} columns, got {x.shape[-1]}")
        out: Tensor = self._multiply(x.float(), self._packed, self.bias, self.out_features)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quantization} by {self._level}"


class Int4Kernel(GroupedKernel):
    """Weights in 4 bits, a scale and a least value per 32 columns, in 8 bits each beside one that up to 256 columns share.

    Weights that were in 4 bits before, in such groups, are found again but for the rounding of these. found: whether all
    were within the range of float16; others would be lost.
    """

    quantization = "int4"

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        packed, errors = kernels.ops.pack_int4(weight.detach().float().contiguous())
        super().__init__(weight, packed, bias, kernels)
        self.found = bool(errors.isfinite().all())


class KQuantKernel(GroupedKernel):
    """Weights as a GGUF file has them, in Q4_K or Q6_K. raw: of these, [out, blocks of 256 columns, 144 or 210 bytes]."""

    def __init__(self, weight: Tensor, raw: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__(weight, kernels.ops.pack_k(raw), bias, kernels)
        self.quantization = "int4" if raw.shape[2] == BLOCKS[Q4_K] else "int6"
