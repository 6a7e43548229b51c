"""Attention of quantized models by our own kernel: the same bits in a pass of any width, without filling anything up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.kernels.models import kernels
from outrider.models.attention import in_float64
from outrider.models.attention.function import give_attention, register_attention

KERNEL = "outrider_kernel"
LANE = 8  # what the size of a head must be a multiple of
LARGE = 2.0**14  # float16 ends at four times that: a model that comes near keeps float32


def use_kernel_attention(module: Any) -> bool:
    """Give it to a model of transformers on a CPU, where that lets its attention be replaced; → whether it has it now."""
    if module.config._attn_implementation != "sdpa":
        return False
    return give_attention(module, KERNEL, attend)


def register_kernel_attention() -> None:
    """For a model that has it already."""
    register_attention(KERNEL, attend)


def keys_dtype(module: Any) -> torch.dtype | None:
    """In what a model with this attention keeps keys and values; None: as it makes them.

    float16 has finer steps than the activations that they are made of, and after 1,000 tokens they are a quarter of all that
    SmolLM2's pass reads in float32.
    """
    return torch.float16 if module.config._attn_implementation == KERNEL else None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it, and where it does not apply in float64 (`in_float64`).

    query [B, heads, N, D], key and value [B, kv_heads, L, D] in float32 or both in float16 → [B, N, heads, D].
    attention_mask: bool [B, 1, N or 1, L], or None for causal, for all in an encoder.
    """
    ours, new, length, size = kernels(), query.shape[2], key.shape[2], query.shape[3]
    unusual = any(others.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    unusual = unusual or value.shape[3] != size or size % LANE != 0 or query.dtype is not torch.float32
    mask = attention_mask
    unusual = unusual or (mask is not None and (mask.dtype is not torch.bool or mask.shape[1] != 1))
    if unusual or ours is None:
        return in_float64.attend(module, query, key, value, mask, scaling=scaling, **others)
    if mask is None and getattr(module, "is_causal", True) and new > 1:
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)[None, None]
    mask = None if mask is None else mask.expand(-1, -1, new, -1)
    scale = size**-0.5 if scaling is None else scaling
    out: Tensor = ours.ops.attend(query, key, value, mask, scale)
    return out, None
