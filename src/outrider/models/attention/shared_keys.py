"""Attention for heads that share keys (grouped queries), side by side: nothing is copied for each of them.

Where a pass has a mask, transformers repeats keys and values for every head that reads them, and every pass of several
tokens has one. Here the queries of such heads stand below each other as further rows of one head: the same sums, two to ten
times as quick on a CPU, the more so the longer the context (EXPERIMENTS.md, "Attention over a long context").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.models.attention.function import give_attention

SHARED_KEYS = "outrider_shared_keys"
Fill = Callable[[int], int]
WIDEST = 64  # tokens of a row: parts of prompts are wider, where the repeated mask would weigh more than repeated keys


def use_shared_keys(module: Any) -> bool:
    """Give it to a model of transformers on a CPU whose heads share keys; → whether it has it now."""
    # Asked of the layers: where these differ, a configuration has no one number of heads.
    shared = any(getattr(part, "num_key_value_groups", 1) > 1 for part in module.modules())
    if module.device.type != "cpu" or not shared or module.config._attn_implementation != "sdpa":
        return False
    return give_attention(module, SHARED_KEYS, attend)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, and by its own function where this one does not apply.

    query [B, heads, N, D], key and value [B, kv_heads, L, ·] → [B, N, heads, E]. attention_mask: [B, 1, N, L] or None.
    """
    times, new = query.shape[1] // key.shape[1], query.shape[2]
    unusual = any(others.get(name) is not None for name in ("position_bias", "softcap", "s_aux", "cache"))
    unusual = unusual or bool(others.get("dropout"))
    alone = attention_mask is None and new == 1  # several tokens without a mask are causal: one would have to be made
    masked = attention_mask is not None and new <= WIDEST and attention_mask.shape[1:3] == (1, new)
    if times == 1 or unusual or not (alone or masked):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        return out, None
    mask = None if attention_mask is None else mask_for_all(attention_mask, times, query.dtype)
    return together(query, key, value, mask, others.get("scaling")).transpose(1, 2).contiguous(), None


def together(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """All heads at once. query [B, heads, N, D], key and value [B, kv_heads, L, ·] → [B, heads, N, E]

    mask: for N · heads / kv_heads rows.
    """
    batch, heads, new, size = query.shape
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1] * new, size)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, new, value.shape[3])


# A pass has a mask for all its layers of one type, two types at most in the models there are: each is repeated once.
# What is kept: (mask, times, fill, what came of it), the newest first, replaced as a whole.
_kept: list[tuple[tuple[Tensor, int, Fill | None, Tensor], ...]] = [()]
_tracing = [False]


def mask_for_all(mask: Tensor, times: int, dtype: torch.dtype, fill: Fill | None = None) -> Tensor:
    """The mask for so many heads below each other, added to the scores: [B, 1, times · N, L], and rows of zeros below.

    mask: [B, 1, N, L]. fill: how many rows there are to be, of how many, at least one more (that it depends on the width
    whether there are any would keep passes from being recorded). Made once for all layers that have the mask.
    """
    # Without inference mode a mask may be written to between the layers, or be asked for its gradient.
    if not (torch.is_inference_mode_enabled() or _tracing[0]):
        return _repeated(mask, times, dtype, fill)
    held = _kept[0]
    for known, by, filled, repeated in held:
        if known is mask and (by, filled) == (times, fill) and repeated.dtype is dtype:
            return repeated
    made = _repeated(mask, times, dtype, fill)
    _kept[0] = ((mask, times, fill, made), *held[:1])
    return made


def forget_masks() -> None:
    """A pass is over: none of its masks comes again."""
    _kept[0] = ()


@contextmanager
def masks_made_once() -> Iterator[None]:
    """While a pass is traced: masks are made for all layers there, too, which otherwise only inference mode allows."""
    _tracing[0] = True
    try:
        yield
    finally:
        _tracing[0] = False
        forget_masks()


def _repeated(mask: Tensor, times: int, dtype: torch.dtype, fill: Fill | None) -> Tensor:
    added = mask
    if mask.dtype is torch.bool:
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    rows = added.repeat(1, 1, times, 1)
    return rows if fill is None else F.pad(rows, (0, 0, 0, fill(rows.shape[2]) - rows.shape[2]))
