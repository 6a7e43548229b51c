"""Drawing a token from weights with one explicit uniform number, by inversion of the cumulative sum.

One number a draw (and not one per vocabulary entry, as with Gumbel noise) keeps the randomness of a round small enough to
be made on the host and sent along, so that the same seed gives the same draws on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64
_FLAT = 1024  # entries up to which one cumulative sum is quicker than two


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds uniform × total. [.., V], [..] in [0, 1) → int64 [..]

    A token of weight 0 is never drawn. Weights need not be normalised. A row that is not a distribution (NaN, infinite or
    zero total) gives -1. Sums are taken in float64, so that the error in the law stays near 1e-16 × V.
    """
    shape, vocabulary = weights.shape[:-1], weights.shape[-1]
    rows = weights.reshape(shape.numel(), vocabulary)
    point = uniforms.reshape(-1).double()
    token = _draw_flat(rows, point) if vocabulary <= _FLAT else _draw_blocks(rows, point)
    return token.reshape(shape)


def _draw_flat(rows: Tensor, uniforms: Tensor) -> Tensor:
    """By one cumulative sum. [N, V], [N] → [N]"""
    cumulative = rows.double().cumsum(-1)
    token, valid, _ = _locate(cumulative, uniforms * cumulative[:, -1])
    return torch.where(valid, token, -1)


def _draw_blocks(rows: Tensor, uniforms: Tensor) -> Tensor:
    """First a block of tokens by the blocks' sums, then a token inside it: V additions, but only V / 64 + 64 in turn."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % _BLOCK))
    blocks = padded.reshape(len(rows), -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    block, valid, rest = _locate(sums, uniforms * sums[:, -1])
    inside = blocks[torch.arange(len(rows), device=rows.device), block].double().cumsum(-1)
    # The rest may exceed the block's own sum by rounding: `_locate` then takes the block's last token of positive weight.
    token, _, _ = _locate(inside, rest)
    return torch.where(valid, block * _BLOCK + token, -1)


def _locate(cumulative: Tensor, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first entry above each point, whether the row is a distribution, and how far the point lies into the entry."""
    total = cumulative[:, -1]
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    valid = total.isfinite() & (total > 0)
    index = torch.searchsorted(cumulative, point.unsqueeze(-1), right=True).clamp(max=cumulative.shape[-1] - 1)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(-1, index).squeeze(-1)
    return index.squeeze(-1), valid, (point - before).clamp(min=0)
