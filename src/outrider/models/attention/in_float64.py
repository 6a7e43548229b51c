"""Attention whose result does not depend on how many queries a pass has: computed in float64, rounded to float32.

Matrix kernels sum in other orders for other shapes. The difference of a last bit is nothing by itself, but where activations
are quantized to 8 bits afterwards it becomes a step (`int8_linear`). In float64 it disappears in the final rounding. Heads
that share keys are multiplied together instead of repeating the keys, so it is as quick as torch's own in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.attention.function import give_attention, register_attention

STEADY = "outrider_steady"


def use_steady_attention(module: Any) -> None:
    """Give it to a model of transformers, where that lets its attention be replaced."""
    give_attention(module, STEADY, attend)


def register_steady_attention() -> None:
    """For a model that has it already."""
    register_attention(STEADY, attend)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it. query [B, heads, N, D], key and value [B, kv_heads, L, ·] → [B, N, heads, E]

    attention_mask: bool [B, 1, N, L] or [B, 1, 1, L]; None for causal, or for all in an encoder. softcap: scores s become
    softcap · tanh(s / softcap). position_bias: [B or 1, heads, N, L], added to the scores (T5).
    """
    if others.get("s_aux") is not None:
        raise ModelError("its attention has sinks, which int8 does not have: use dtype bfloat16")
    batch, heads, new, size = query.shape
    groups, length = key.shape[1], key.shape[2]
    scale = size**-0.5 if scaling is None else scaling
    together = (query.double() * scale).reshape(batch, groups, heads // groups * new, size)
    scores = torch.matmul(together, key.double().transpose(2, 3)).view(batch, groups, heads // groups, new, length)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    bias = others.get("position_bias")
    if bias is not None:
        scores = scores + bias.double().view(bias.shape[0], groups, heads // groups, *bias.shape[2:])
    if attention_mask is None and getattr(module, "is_causal", True):
        attention_mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)[None, None]
    if attention_mask is not None:
        scores = scores.masked_fill_(~attention_mask[:, :, None], -torch.inf)
    weights = scores.softmax(-1)
    out = torch.matmul(weights.view(batch, groups, -1, length), value.double())
    return out.view(batch, heads, new, -1).transpose(1, 2).to(query.dtype), None
