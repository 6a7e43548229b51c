"""Linear layers by our own kernels: weights in 8 or 4 bits, activations rounded to 8 with a scale per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.models import Kernels
from outrider.models.packed_linear import OpaqueLinear

OUTPUTS = 16  # of a block
GROUP = 32  # columns that share a scale, in 4 bits
BITS_OF_GROUPS = 5  # of a weight in 4 bits, with its share of the scale and the least value


class Int8Kernel(OpaqueLinear):
    """x → x · weightᵀ + bias, both rounded to 8 bits, a scale per output. [.., in] → [.., out], in x's type.

    The same integers as `Int8Linear` by torch's kernels, so the same bits.
    """

    rounding = "int8"

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
        return f"{super().extra_repr()}, {self.rounding} by {self._level}"


class Int4Kernel(OpaqueLinear):
    """x → x · weightᵀ + bias, weights in 4 bits with a scale and a least value per 32 columns, activations in 8.

    [.., in] → [.., out], in x's type. Weights that were in 4 bits before, in such groups, are found again. found: whether
    all were within the range of float16; others would be lost.
    """

    rounding = "int4"

    def __init__(self, weight: Tensor, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        self._packed, errors = kernels.ops.pack_int4(weight.detach().float().contiguous())
        self.found = bool(errors.isfinite().all())
        self._multiply: Any = kernels.ops.linear_int4
        self._level = kernels.level
        self.bytes_per_weight = BITS_OF_GROUPS / 8

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._multiply(x.float(), self._packed, self.bias, self.out_features)
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.rounding} by {self._level}"
