"""Attention in float32 whose bits do not depend on how many queries a pass has: the rows in fours, the keys in blocks.

Matrix kernels sum in other orders for other shapes, and torch's attention for CPUs multiplies 32 rows with 512 keys at a
time. A block of 512 keys is summed in one order if there are four rows or more, and its first 64 or 128 keys like these
alone. So the rows are filled up to a multiple of four, and as many columns are read as such blocks have (`columns_read`):
what lies beyond a row's own position is masked and adds zeros. Models in 8 bits use it (`steady_attention` says why): keys
are read as they are, where float64 has to copy all of them.

That kernels add up so is nowhere promised: `adds_up_alike` tries it where it is to be used.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models import steady_attention
from outrider.models.shared_keys import WIDEST, mask_for_all

BLOCKS = "outrider_blocks"
BLOCK = 512  # keys that torch's kernel multiplies at once
STARTS = (64, 128)  # parts of one that are summed like its beginning
ROWS = 4
_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def columns_read(longest: int) -> int:
    """How many columns of the cache a pass reads whose last position is longest - 1: whole blocks, or a part of the last."""
    whole, more = divmod(longest, BLOCK)
    return whole * BLOCK + next((size for size in (0, *STARTS) if more <= size), BLOCK)


def use_block_attention(module: Any) -> bool:
    """Give it to a decoder-only model of transformers on a CPU; → whether it has it now."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    config = module.config
    heads, groups, size = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if getattr(config, "is_encoder_decoder", False) or not isinstance(heads, int) or config._attn_implementation != "sdpa":
        return False
    groups = heads if groups is None else groups
    size = config.hidden_size // heads if size is None else size
    if groups < 2 or not adds_up_alike(heads, groups, size, torch.get_num_threads()):
        return False  # a single product is divided among threads by its rows
    AttentionInterface.register(BLOCKS, attend)
    AttentionMaskInterface.register(BLOCKS, sdpa_mask)
    module.set_attn_implementation(BLOCKS)
    return bool(module.config._attn_implementation == BLOCKS)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """As transformers calls it, and in float64 where it does not apply.

    query [B, heads, N, D], key and value [B, kv_heads, L, D] → [B, N, heads, D]. attention_mask: bool [B, 1, N, L], L
    being `columns_read` of something, or None for causal.
    """
    unusual = any(others.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    unusual = unusual or (attention_mask is None and not getattr(module, "is_causal", True))
    unusual = unusual or value.shape[3] != query.shape[3] or query.dtype is not torch.float32
    if unusual or key.shape[1] == 1:  # a lone product is divided among threads, by its rows
        return steady_attention.attend(module, query, key, value, attention_mask, **others)
    if attention_mask is None:  # without a cache: the keys there are
        new, length = query.shape[2], key.shape[2]
        columns = columns_read(length)
        attention_mask = torch.ones(new, columns, dtype=torch.bool).tril(length - new)[None, None]
        key, value = (F.pad(held, (0, 0, 0, columns - length)) for held in (key, value))
    times = query.shape[1] // key.shape[1]
    if query.shape[2] > WIDEST and times > 1:  # repeated keys weigh less than a repeated mask
        key, value, times = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), 1
    mask = mask_for_all(attention_mask, times, query.dtype, ROWS)
    return _together(query, key, value, mask, others.get("scaling")).transpose(1, 2).contiguous(), None


def _together(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Heads that share keys below each other. → [B, heads, N, D]. mask: [B, 1, rows, L], `ROWS` times something."""
    batch, heads, new, size = query.shape
    count = heads // key.shape[1] * new
    rows = F.pad(query.reshape(batch, key.shape[1], count, size), (0, 0, 0, mask.shape[2] - count))
    out: Tensor = _attention(rows, key, value, attn_mask=mask, scale=scale)[0]
    return out[:, :, :count].reshape(batch, heads, new, size)


@cache
@torch.inference_mode()
def adds_up_alike(heads: int, groups: int, size: int, threads: int) -> bool:
    """Whether one token at a time and several together give the same bits here, with so many threads. 20 ms."""
    del threads
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 40, size, generator=draw)
    key, value = (torch.randn(1, groups, 2 * BLOCK, size, generator=draw) for _ in range(2))
    for last in (*(start + 20 for start in STARTS), BLOCK - 1, BLOCK + 20, BLOCK + STARTS[0] + 20):
        found = []
        for width in (1, 2, 5, 40):
            parts = []
            for first in range(0, 40, width):
                columns = columns_read(last - 40 + first + width)
                at = torch.arange(last - 40 + first, last - 40 + first + width)
                mask = (torch.arange(columns) <= at[:, None])[None, None]
                made = mask_for_all(mask, heads // groups, torch.float32, ROWS)
                queries = query[:, :, first : first + width]
                parts.append(_together(queries, key[:, :, :columns], value[:, :, :columns], made, None))
            found.append(torch.cat(parts, 2))
        if not all(torch.equal(found[0], other) for other in found[1:]):
            return False
    return True
