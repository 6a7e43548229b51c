"""Attention as one marked operation, so that a traced model shows where a cache belongs.

transformers lets a model's attention be replaced by name. Ours computes causal attention over one flat sequence in a single
custom operation; tracing keeps it whole, and the engine puts OpenVINO's paged attention in its place. What that can't
express (soft-capped scores, attention sinks, masks of the model's own) is refused while the model is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError

NAME = "outrider_marked"
OPERATION = "outrider::marked_attention"


@torch.library.custom_op(OPERATION, mutates_args=())
def marked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
) -> Tensor:
    """Causal attention within one sequence, what paged attention does without a cache.

    query [T, heads·size], key [T, kv_heads·size], value [T, kv_heads·value_size] → [T, heads·value_size]. window: a token
    sees itself and the window - 1 before it; 0 for all.
    """
    length = query.shape[0]
    q, k = (x.view(length, n, size).transpose(0, 1) for x, n in ((query, heads), (key, kv_heads)))
    v = value.view(length, kv_heads, value_size).transpose(0, 1)
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    back = torch.arange(length).unsqueeze(-1) - torch.arange(length)
    mask = (back >= 0) & (back < window) if window else back >= 0
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(0, 1).reshape(length, -1)


def register() -> None:
    """Make the attention known to transformers as `NAME`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    del args, kwargs


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function. query [1, heads, T, D], key and value likewise → [1, T, heads, E]"""
    del dropout
    odd = [name for name in ("softcap", "s_aux", "position_bias", "head_mask") if others.get(name) is not None]
    odd += ["attention_mask"] if attention_mask is not None else []
    odd += ["is_causal=False"] if others.get("is_causal", getattr(module, "is_causal", True)) is False else []
    if odd:
        raise ModelError(f"its attention uses {' and '.join(odd)}, which paged attention does not have")
    heads, size, kv_heads = query.shape[1], query.shape[3], key.shape[1]
    flat = [x.transpose(1, 2).reshape(-1, n * x.shape[3]) for x, n in ((query, heads), (key, kv_heads), (value, kv_heads))]
    scale = float(scaling) if scaling is not None else float(size) ** -0.5
    out = torch.ops.outrider.marked_attention(*flat, scale, int(sliding_window or 0), heads, kv_heads, size, value.shape[3])
    return out.view(1, -1, heads, value.shape[3]), None
