"""The same bits for a token in a pass of any width, in bfloat16: then greedy speculation writes plain decoding's text.

bfloat16's best logits often tie, and a last bit decides there. Two things sum in an order that may depend
on the width: products, by the kernel that oneDNN takes for so many rows, and attention (`in_blocks`). Products of four
rows and more are alike on the processors that this is used on, those of fewer are not: so fewer rows are filled up to four,
which takes no longer.

Nothing of it is promised by anybody: it is tried with each shape of a layer, on sums that cancel, where any other order
gives other bits. Where the trial fails all stays as it was, and near-ties may fall otherwise (EXPERIMENTS.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.models.attention.in_blocks import use_block_attention
from outrider.models.weights.packed_linear import OpaqueLinear, PackedLinear, plain_weight

FILL = 4  # rows
FALLS_BACK = ("attn_logit_softcapping", "v_head_dim", "kv_lora_rank")  # of what `in_blocks` leaves to other attention
WIDTHS = (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 24, 32, 33, 48, 64)
CONVOLVED = (*range(1, 20), 33, 64, 257)  # tokens
OWN = 1 << 24  # layers of more weights than that are tried with these: so many outputs show it on any input


def use_same_bits(module: Any) -> bool:
    """Have a packed bfloat16 model compute so, if that gives the same bits here; → whether it does now."""
    if any(getattr(module.config, name, None) is not None for name in FALLS_BACK):
        return False
    if module.dtype is not torch.bfloat16 or not _products_alike(module) or not use_block_attention(module):
        return False
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            layer.fill = FILL
    return True


def _products_alike(module: Any) -> bool:
    """Whether products of `FILL` rows and more have the same bits in all its layers."""
    threads = torch.get_num_threads()
    for layer in module.modules():
        if isinstance(layer, PackedLinear):
            shape = (layer.out_features, layer.in_features)
            large = layer.out_features * layer.in_features > OWN
            if not (_large_alike(layer, *shape, threads) if large else _alike(*shape, threads)):
                return False
        elif isinstance(layer, OpaqueLinear) or plain_weight(layer) is not None or multiplies(layer):
            return False  # not laid out: nobody has tried these
    return True


def convolutions_alike(layers: Iterable[torch.nn.Module]) -> bool:
    """Whether convolutions of each channel by itself have the same bits over any number of tokens."""
    threads = torch.get_num_threads()
    return all(
        _convolves_alike(layer.weight.shape[0], layer.weight.shape[2], layer.weight.dtype, threads)
        for layer in layers
        if isinstance(layer, nn.Conv1d)
    )


@cache
def _convolves_alike(channels: int, kernel: int, dtype: torch.dtype, threads: int) -> bool:
    del threads
    weight, x = (_wide(channels, count).to(dtype) for count in (kernel, 2 * kernel + 1 + max(CONVOLVED)))
    with torch.inference_mode():
        wanted = F.conv1d(x.unsqueeze(0), weight.unsqueeze(1), padding=kernel - 1, groups=channels)
        for first in range(kernel, 2 * kernel + 1):  # of the tokens that are new, behind the inputs that are kept
            for width in CONVOLVED:
                part = x[None, :, first - kernel : first + width]
                found = F.conv1d(part, weight.unsqueeze(1), padding=kernel - 1, groups=channels)
                if not torch.equal(found[..., kernel : kernel + width], wanted[..., first : first + width]):
                    return False
    return True


def multiplies(layer: torch.nn.Module) -> bool:
    """Whether a layer has weights of its own to multiply with: experts have, over as many tokens as are sent to each.

    Convolutions of each channel by itself are tried apart (`convolutions_alike`).
    """
    if isinstance(layer, nn.Conv1d) and layer.groups == layer.in_channels == layer.out_channels:
        return False
    own = layer.parameters(recurse=False)
    return not isinstance(layer, torch.nn.Embedding) and any(weight.dim() > 1 for weight in own)


def _large_alike(layer: PackedLinear, rows: int, columns: int, threads: int) -> bool:
    which = (rows, columns, threads)
    if which not in _large:
        _large[which] = _tried(layer, _wide(WIDTHS[-1], columns))
    return _large[which]


_large: dict[tuple[int, int, int], bool] = {}


@cache
def _alike(rows: int, columns: int, threads: int) -> bool:
    """With weights and inputs whose products cancel: what is left is what rounding made, in whatever order it was summed."""
    del threads
    half = columns // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(1))
    weight, x = _wide(rows, half), _wide(WIDTHS[-1], half)
    whole, odd = torch.cat([weight, weight[:, order]], 1), torch.zeros(rows, columns % 2, dtype=weight.dtype)
    inputs = torch.cat([x, -x[:, order], torch.zeros(WIDTHS[-1], columns % 2, dtype=x.dtype)], 1)
    with torch.inference_mode():
        return _tried(PackedLinear(torch.cat([whole, odd], 1), None), inputs)


@torch.inference_mode()
def _tried(layer: PackedLinear, x: Tensor) -> bool:
    """x: bfloat16 [the largest of `WIDTHS`, in]"""
    wanted = layer.product(x)
    return all(torch.equal(layer.product(x[:width]), wanted[:width]) for width in WIDTHS)


def _wide(rows: int, columns: int) -> Tensor:
    """Numbers of many sizes. bfloat16 [rows, columns]"""
    draw = torch.Generator().manual_seed(rows)
    sizes = torch.randint(-3, 4, (rows, columns), generator=draw)
    return (torch.randn(rows, columns, generator=draw) * torch.exp2(sizes)).bfloat16()
