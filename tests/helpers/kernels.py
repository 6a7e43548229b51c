"""Rows, rounded weights, products and rotations beside which our kernels are held."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.build import LEVELS, level_here

HERE = list(LEVELS)[list(LEVELS).index(level_here() or "") :] if level_here() else []  # what this processor has, and less


def rows_of(columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, 13, columns], rows of very different size, one of zeros"""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(2, 13, columns, generator=generator) * torch.rand(2, 13, 1, generator=generator) ** 4 * 1e3
    x[0, 3] = 0.0
    return x.to(dtype)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The integers of rows [.., in], and their scales [.., 1], as float64 and float32"""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((x / scale + 128).round() - 128).double(), scale


def product(x: Tensor, weight: Tensor, block: int) -> Tensor:
    """Of a weight [out, in] in float64 and rows [.., in] that are rounded by a scale for each block of columns"""
    total = torch.zeros(*x.shape[:-1], len(weight), dtype=torch.float64)
    for at in range(0, x.shape[-1], block):
        values, scale = rounded(x[..., at : at + block])
        total += values @ weight[:, at : at + block].T * scale
    return total


def turned(x: Tensor) -> Tensor:
    """The halves of rows [.., size] exchanged, the first of them negative: what a rotation multiplies with its sines."""
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


HEADS: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 96,
    "max_position_embeddings": 2048,
}
