"""Drawing a token from weights with one explicit uniform number, by inversion of the cumulative sum.

One number a draw (and not one per vocabulary entry, as with Gumbel noise) keeps the randomness of a round small enough to
be made on the host and sent along, so that the same seed gives the same draws on every device. Rows that ask for it draw
by the numbers of their positions instead: see `race`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.sampling import reading
from outrider.randomness import RandomStream, keys_of
from outrider.sampling.race import race
from outrider.support.device_data import row_by_row, to_device

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
    return _draw_rows(rows, point).reshape(shape)


def draw_each(
    laws: Tensor, streams: Many[RandomStream], positions: Many[int], ids: Tensor | None = None, vocab_size: int = 0
) -> Tensor:
    """A column a row, by the row's own stream. [R, T] → int64 [R], on the laws' device; -1 as in `draw`

    positions: of the tokens that are drawn, in their texts. ids: int64 [T], ascending, the tokens that the columns stand
    for, if these are not all; `vocab_size` is their number then.
    """
    keys = keys_of(streams)
    if keys is not None and ids is None:
        return race(laws, keys, positions)
    if keys is not None and ids is not None:
        won = race(laws.new_zeros(len(laws), vocab_size).index_copy_(1, ids, laws), keys, positions)
        return torch.where(won < 0, won, torch.searchsorted(ids, won.clamp(min=0)))
    uniforms = [stream.aim(laws, row, ids) for row, stream in enumerate(streams)]
    return _draw_rows(laws, to_device(uniforms, laws.device, torch.float64))


def _draw_rows(rows: Tensor, uniforms: Tensor) -> Tensor:
    """[N, V], float64 [N] → int64 [N]"""
    ours = reading(rows)
    if ours is not None and rows.dtype is torch.float32:
        tokens: Tensor = ours.draw(rows, uniforms)
        return tokens
    if row_by_row(rows):
        pairs = zip(on_host(rows), uniforms.tolist(), strict=True)
        return torch.tensor([draw_on_host(row, share) for row, share in pairs], dtype=torch.long)
    return draw_on_device(rows, uniforms)


def on_host(values: Tensor) -> NDArray[Any]:
    """A CPU's tensor as an array, without a copy where NumPy has its type."""
    values = values.detach()
    held: NDArray[Any] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return held


def draw_on_host(weights: NDArray[Any], uniform: float) -> int:
    """Row by row in NumPy, few operations: see `truncate_host`. [V] → the token, or -1"""
    with np.errstate(over="ignore"):
        sums = np.add.reduceat(weights, _starts(len(weights)), dtype=np.float64)
        reached = np.cumsum(sums)
    total = float(reached[-1])
    if not 0.0 < total < math.inf:
        return -1
    point = min(uniform * total, math.nextafter(total, 0.0))
    block = int(np.searchsorted(reached, point, side="right"))
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    rest = point - reached[block - 1] if block else point
    # The rest may exceed the block's own sum by rounding.
    rest = min(rest, math.nextafter(inside[-1], 0.0))
    return block * _BLOCK + int(np.searchsorted(inside, rest, side="right"))


@lru_cache(maxsize=16)
def _starts(vocabulary: int) -> NDArray[Any]:
    """Where blocks begin."""
    return np.arange(0, vocabulary, _BLOCK)


def draw_on_device(rows: Tensor, uniforms: Tensor) -> Tensor:
    """The same, with nothing read back. [N, V], float64 [N] → int64 [N]"""
    return _draw_flat(rows, uniforms) if rows.shape[-1] <= _FLAT else _draw_blocks(rows, uniforms)


def _draw_flat(rows: Tensor, uniforms: Tensor) -> Tensor:
    """By one cumulative sum. [N, V], [N] → [N]"""
    token, valid, _ = _locate(rows.double(), uniforms, scaled=True)
    return torch.where(valid, token, -1)


def _draw_blocks(rows: Tensor, uniforms: Tensor) -> Tensor:
    """First a block of tokens by the blocks' sums, then a token inside it: V additions, but only V / 64 + 64 in turn."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % _BLOCK))
    blocks = padded.reshape(len(rows), -1, _BLOCK)
    block, valid, rest = _locate(blocks.sum(-1, dtype=torch.float64), uniforms, scaled=True)
    inside = blocks[torch.arange(len(rows), device=rows.device), block].double()
    # The rest may exceed the block's own sum by rounding: `_locate` then takes the block's last token of positive weight.
    token, _, _ = _locate(inside, rest, scaled=False)
    return torch.where(valid, block * _BLOCK + token, -1)


def _locate(weights: Tensor, point: Tensor, scaled: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The entry whose part of the cumulative sum holds each point. [N, W], [N] → the entry, whether the row is a
    distribution, how far the point lies into the entry.

    scaled: points are shares of the total.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    point = torch.minimum(point * total if scaled else point, torch.nextafter(total, torch.zeros_like(total)))
    valid = total.isfinite() & (total > 0)
    index = torch.searchsorted(cumulative, point.unsqueeze(-1), right=True).clamp(max=cumulative.shape[-1] - 1)
    # A parallel scan (CUDA) may step up by an ulp over entries of weight 0: such an entry must not be drawn even so.
    index = torch.where(weights.gather(-1, index) > 0, index, weights.argmax(-1, keepdim=True))
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(-1, index).squeeze(-1)
    return index.squeeze(-1), valid, (point - before).clamp(min=0)
