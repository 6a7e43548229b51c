"""Attention whose bits do not depend on how many queries a pass has: four rows and more, the keys in blocks.

Matrix kernels sum in other orders for other shapes, and torch's attention for CPUs multiplies 32 rows with 512 keys at a
time. A block of 512 keys is summed in one order if there are four rows or more, and its first 64, 128, … keys like these
alone. So fewer rows are filled up (`few`; to a multiple of four where that is not enough, `fours`), and as many columns are
read as such blocks have (`columns_read`): what lies beyond a row's own position is masked and adds zeros. Models in 8 bits
use it where there are no kernels of ours (`kernels`); attention is in float32 there (`in_float64` says why): keys are
read as they are, where float64 has to copy all of them. And models in bfloat16 whose products have the same bits, too
(`same_bits`).

That kernels add up so is nowhere promised: `adds_up_alike` tries it where it is to be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.attention import in_float64, shared_keys
from outrider.models.attention.function import give_attention
from outrider.models.attention.shared_keys import WIDEST, Fill, mask_for_all

BLOCKS = "outrider_blocks"
BLOCK = 512  # keys that torch's kernel multiplies at once
PARTS = (64, 128, 192, 256, 320, 384, 448)  # of one, which may be summed like its beginning
DTYPES = (torch.float32, torch.bfloat16)
QUERIES = 32  # rows that it multiplies at once
WIDTHS = (1, 2, 3, 4, 5, 11, 12, 40)  # of passes that are tried
_fills: dict[tuple[int, int, int, torch.dtype], Fill] = {}  # by heads, heads of keys, size, type, as they were tried
_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def few(rows: int) -> int:
    """One row more, and further ones if the last `QUERIES` rows would be one to three."""
    return rows + 1 + 3 * (rows // QUERIES - (rows - 3) // QUERIES)


def fours(rows: int) -> int:
    """The next multiple of four."""
    return (rows // 4 + 1) * 4


@dataclass(frozen=True)
class Alike:
    """What gives the same bits. fill: `few` or `fours`. parts: of a block, those summed like its beginning."""

    fill: Fill
    parts: tuple[int, ...]


def columns_read(longest: int, parts: tuple[int, ...] = ()) -> int:
    """How many columns of the cache a pass reads whose last position is longest - 1: whole blocks, or a part of the last."""
    whole, more = divmod(longest, BLOCK)
    return whole * BLOCK + next((size for size in (0, *parts) if more <= size), BLOCK)


def columns_of(module: Any) -> Callable[[int], int]:
    """`columns_read` for a model that has this attention; as many as there are for others."""
    if module.config._attn_implementation != BLOCKS:
        return int
    found = _alike(module)
    return partial(columns_read, parts=found.parts if found else ())


def describe_attention(module: Any) -> str:
    """What a recorded pass depends on: how its rows were filled up. Empty for other attention."""
    found = _alike(module) if module.config._attn_implementation == BLOCKS else None
    return found.fill.__name__ if found else ""


def _alike(module: Any) -> Alike | None:
    """`adds_up_alike` for a model; None, too, for what this attention is not for."""
    config = module.config
    heads, groups, size = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if getattr(config, "is_encoder_decoder", False) or not isinstance(heads, int):
        return None
    groups = heads if groups is None else groups
    size = config.hidden_size // heads if size is None else size
    if groups < 2:  # a single product is divided among threads by its rows
        return None
    found = adds_up_alike(heads, groups, size, torch.get_num_threads(), module.dtype)
    if found is not None:
        _fills[heads, groups, size, module.dtype] = found.fill
    return found


def use_block_attention(module: Any) -> bool:
    """Give it to a decoder-only model of transformers on a CPU; → whether it has it now."""
    if module.config._attn_implementation != "sdpa" or _alike(module) is None:
        return False
    return give_attention(module, BLOCKS, attend)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """As transformers calls it, and where it does not apply in float64, or for bfloat16 by `shared_keys`.

    query [B, heads, N, D], key and value [B, kv_heads, L, D] → [B, N, heads, D]. attention_mask: bool [B, 1, N, L], L
    being `columns_read` of something, or None for causal.
    """
    unusual = any(others.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    unusual = unusual or (attention_mask is None and not getattr(module, "is_causal", True))
    unusual = unusual or value.shape[3] != query.shape[3] or query.dtype not in DTYPES
    if unusual or key.shape[1] == 1:  # a lone product is divided among threads, by its rows
        other = shared_keys.attend if query.dtype is torch.bfloat16 else in_float64.attend
        return other(module, query, key, value, attention_mask, **others)
    if attention_mask is None:  # without a cache: the keys there are
        new, length = query.shape[2], key.shape[2]
        columns = columns_read(length)
        attention_mask = torch.ones(new, columns, dtype=torch.bool).tril(length - new)[None, None]
        key, value = (F.pad(held, (0, 0, 0, columns - length)) for held in (key, value))
    times = query.shape[1] // key.shape[1]
    if query.shape[2] > WIDEST and times > 1:  # repeated keys weigh less than a repeated mask
        key, value, times = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), 1
    fill = _fills.get((query.shape[1], key.shape[1], query.shape[3], query.dtype), fours)
    mask = mask_for_all(attention_mask, times, query.dtype, fill)
    return _together(query, key, value, mask, others.get("scaling")).transpose(1, 2).contiguous(), None


def _together(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Heads that share keys below each other. → [B, heads, N, D]. mask: [B, 1, rows and those filled up, L]"""
    batch, heads, new, size = query.shape
    count = heads // key.shape[1] * new
    rows = F.pad(query.reshape(batch, key.shape[1], count, size), (0, 0, 0, mask.shape[2] - count))
    out: Tensor = _attention(rows, key, value, attn_mask=mask, scale=scale)[0]
    return out[:, :, :count].reshape(batch, heads, new, size)


@cache
@torch.inference_mode()
def adds_up_alike(heads: int, groups: int, size: int, threads: int, dtype: torch.dtype) -> Alike | None:
    """How one token at a time and several together give the same bits here, with so many threads; None if they don't.

    100 to 300 ms. Tried with keys that differ, and with values that cancel under equal weights: in bfloat16 another order
    of a sum is seldom seen otherwise.
    """
    del threads
    times, draw = heads // groups, torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, WIDTHS[-1], size, generator=draw).to(dtype)
    key, value, sizes = (torch.randn(1, groups, 2 * BLOCK, size, generator=draw) for _ in range(3))
    key, wide = key.to(dtype), value * torch.exp2(sizes.mul(2).round())

    def same(length: int, columns: int, fill: Fill) -> bool:
        """Of queries that see so many keys, when so many columns are read, in passes of any width."""
        half = length // 2
        cancelling = torch.zeros_like(wide)
        cancelling[:, :, :half] = wide[:, :, :half]
        cancelling[:, :, half : 2 * half] = -wide[:, :, torch.randperm(half, generator=draw)]
        for queries, values in ((query, value.to(dtype)), (torch.zeros_like(query), cancelling.to(dtype))):
            whole = _passes(queries, key, values, length, columns_read(length), WIDTHS[-1], times, fours)
            for width in WIDTHS:
                parted = _passes(queries, key, values, length, columns, width, times, fill)
                if not torch.equal(parted, whole[:, :, : parted.shape[2]]):
                    return False
            rows, keys, held = (one.expand(3, -1, -1, -1) for one in (queries, key, values))  # of a batch
            together = _passes(rows, keys, held, length, columns, 5, times, fill)
            if not torch.equal(together, whole[:, :, : together.shape[2]].expand(3, -1, -1, -1)):
                return False
        return True

    edges = [(length, columns_read(length)) for length in (BLOCK // 2, BLOCK - 1, BLOCK + 20, 2 * BLOCK)]
    edges.append((BLOCK - 20, 2 * BLOCK))  # a further block, for later tokens of the pass
    fill = next((fill for fill in (few, fours) if all(same(*edge, fill) for edge in edges)), None)
    if fill is None:
        return None
    parts = [part for part in PARTS if all(same(start + part - 3, start + part, fill) for start in (0, BLOCK))]
    return Alike(fill, tuple(parts))


def _passes(
    query: Tensor, key: Tensor, value: Tensor, length: int, columns: int, width: int, times: int, fill: Fill
) -> Tensor:
    """What queries get that all see `length` keys, by three passes of a width. → [B, heads, N, D]"""
    made = []
    for first in range(0, min(query.shape[2], 3 * width), width):
        some = query[:, :, first : first + width]
        mask = (torch.arange(columns) < length).expand(len(some), 1, some.shape[2], columns)
        rows = mask_for_all(mask, times, query.dtype, fill)
        made.append(_together(some, key[:, :, :columns], value[:, :, :columns], rows, None))
    return torch.cat(made, 2)
