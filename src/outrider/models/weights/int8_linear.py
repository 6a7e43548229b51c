"""Linear layers with 8-bit weights and activations by torch's kernels, for CPUs where ours (`kernels`) can't be had.

Weights are quantized once, with a scale per output. Activations are quantized in each call, with a scale per token: torch's
kernel has one scale for a whole pass, which would make a token's logits depend on the drafted tokens beside it. So every row
is divided by its own scale first and the kernel's is 1. The products are summed as integers: a row's result is the same to
the bit however many rows there are, and by either of two kernels: oneDNN's computes sixteen rows in the time of one where
the processor has tiles of integers (AMX), but each call of it takes longer, so that small layers keep the other one.

Processors without VNNI add two products in 16 bits and cut the sum at 32,767. There weights have 129 levels (±64) instead of
255, so that no two products exceed it: 2 · 255 · 64 = 32,640. Activations keep all of theirs, since they have the outliers:
with 127 levels of activations and all of weights the divergence from the model was three times as large (EXPERIMENTS.md).

Rounding makes a step of any difference in a last bit, so nothing else may depend on the width of a pass either: see
`in_blocks` and `in_float64`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outrider.models.weights.packed_linear import OpaqueLinear

ZERO = 128  # the kernel takes unsigned activations: the zero is in the middle
UNIT = 1.0
LARGEST = 127  # of a quantized activation
WEIGHTS = (127, 64)  # the largest quantized weight: where sums of two products are exact, and where they are cut
TILES_FROM = 1 << 23  # weights of a layer: a lone row takes 28 µs longer, several take less (EXPERIMENTS.md)
_multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32


class RowScale:
    """The last input divided by its rows' scales: layers side by side (query, key, value; gate, up) share it.

    It is known by the tensor, not by its values: a model must not change the input of a layer in place and pass it again.
    """

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._divided: tuple[Tensor, Tensor] | None = None
        self._quantized: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X [.., in] → x / scale, scale [.., 1]; float32."""
        if self._input is not x or self._divided is None:
            wide = x.float()
            scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-30).div_(LARGEST)
            self._input, self._divided, self._quantized = x, (wide / scale, scale), None
        return self._divided

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X [.., in] → x / scale + ZERO as uint8, scale [.., 1] in float32.

        As the other kernel rounds: after the zero was added, which costs a number's last bits.
        """
        divided, scale = self(x)
        if self._quantized is None:
            self._quantized = (divided + ZERO).round_().to(torch.uint8)
        return self._quantized, scale


class Int8Linear(OpaqueLinear):
    """x → x · weightᵀ + bias, both quantized to 8 bits. [.., in] → [.., out], in x's type.

    tiles: whether by oneDNN's kernel, None: where it is quicker. largest: of its quantized weights, None: what this
    processor multiplies exactly.
    """

    quantization = "int8"

    def __init__(
        self, weight: Tensor, bias: Tensor | None, rows: RowScale, tiles: bool | None = None, largest: int | None = None
    ) -> None:
        super().__init__(weight, None if bias is None else bias.float())
        self.tiles = suits_tiles(weight) if tiles is None else tiles
        scales = weight.detach().abs().amax(1).double().clamp_min(1e-30) / (largest or largest_weight() or WEIGHTS[0])
        zeros = torch.zeros(len(weight), dtype=torch.int32, device=weight.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces another home for quantized tensors; the kernels stay
            quantized = torch.quantize_per_channel(weight.detach().float(), scales, zeros.long(), 0, torch.qint8)
            if self.tiles:
                self._packed = torch.ops.onednn.qlinear_prepack(quantized.int_repr(), None)
            else:
                self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self.register_buffer("scales", scales.float() if self.tiles else None, persistent=False)
        self.register_buffer("zeros", zeros if self.tiles else None, persistent=False)
        self._rows = rows
        self.bytes_per_weight = 1

    def forward(self, x: Tensor) -> Tensor:
        given, scale = self._rows.quantized(x) if self.tiles else self._rows(x)
        out = self._product(given)
        out = out.mul_(scale) if self.bias is None else torch.addcmul(self.bias, out, scale)
        return out.to(x.dtype)

    def _product(self, x: Tensor) -> Tensor:
        """Of rows that were divided by their scales, still without these: [.., in] → float32 [.., out]"""
        out: Tensor
        if self.tiles:
            out = torch.ops.onednn.qlinear_pointwise(*tiles_arguments(x, self._packed, self.scales, self.zeros))
        else:
            out = _multiply(*product_arguments(x, self._packed))
        return out


def product_arguments(x: Any, weight: Any) -> tuple[Any, ...]:
    """What fbgemm's kernel is called with, or what stands for it in a graph."""
    return x, UNIT, ZERO, weight


def tiles_arguments(x: Any, weight: Any, scales: Any, zeros: Any) -> tuple[Any, ...]:
    """The same for oneDNN's. X: quantized, as uint8."""
    return x, UNIT, ZERO, weight, scales, zeros, None, UNIT, 0, torch.float32, "none", [], ""


def suits_tiles(weight: Tensor) -> bool:
    """Whether oneDNN's kernel is the quickest for a layer of this weight: a large one, where there are tiles."""
    return weight.numel() >= TILES_FROM and has_tiles()


@cache
def largest_weight() -> int | None:
    """The largest of `WEIGHTS` whose products with the largest activations are added up exactly here, None if none is."""
    return next((largest for largest in WEIGHTS if _adds_up(largest)), None)


def _adds_up(largest: int) -> bool:
    signs = torch.tensor([[1.0], [-1.0]], device="cpu").repeat(4, 1)
    try:
        layer = Int8Linear(signs.repeat(1, 256), None, RowScale(), tiles=False, largest=largest)
        product = layer(torch.ones(8, 256, device="cpu"))
        return torch.allclose(product, 256.0 * signs.view(1, 8).expand(8, 8), rtol=0.01)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@cache
def has_tiles() -> bool:
    """Whether this processor has tiles of integers, and oneDNN's kernel gives the other's results to the bit."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # older versions of torch have none
    if capabilities is None or not capabilities().get("amx_int8"):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, 160, generator=generator), torch.randn(5, 160, generator=generator)
    try:
        with torch.inference_mode():
            return torch.equal(*(Int8Linear(weight, None, RowScale(), tiles)(x) for tiles in (False, True)))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
