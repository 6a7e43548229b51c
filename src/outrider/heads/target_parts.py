"""What a head takes from its target: the embedding of tokens and the rows of the output layer.

The output layer may be packed for the CPU's kernels or quantized, and then its weight can't be read: it is applied to unit
vectors instead, which gives the same rows whatever the layer is made of.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.errors import ModelError
from outrider.models.base import HandsOutStates

UNITS = 64  # unit vectors at once: bounds the memory to some 64 · V numbers


@torch.inference_mode()
def output_rows(target: HandsOutStates, tokens: Tensor, dtype: torch.dtype | None = None) -> nn.Linear:
    """A linear layer with the rows of the target's output layer for `tokens` (int64 [T]), frozen. [.., W] → [.., T]

    dtype: of the layer, the one of the target's states if not given.
    """
    own, device, width = target.state_dtype, target.device, target.state_size
    dtype = dtype or own
    units = torch.eye(width, dtype=own, device=device)
    offset = target.logits_of(torch.zeros(1, width, dtype=own, device=device))[:, tokens].to(dtype)
    if bool(offset.isneginf().any()):
        raise ModelError("a target whose own head was cut has no rows for some tokens: load it whole to draft by its states")
    columns = [target.logits_of(part)[:, tokens].to(dtype) - offset for part in units.chunk(-(-width // UNITS))]
    bias = bool(offset.any())
    with torch.inference_mode(False):
        rows = nn.Linear(width, len(tokens), bias=bias, dtype=dtype, device=device).requires_grad_(False)
    rows.weight.data.copy_(torch.cat(columns).T)
    if bias:
        rows.bias.data.copy_(offset[0])
    return rows
