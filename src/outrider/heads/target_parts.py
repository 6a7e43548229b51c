"""What a head takes from its target: the embedding of tokens and the rows of the output layer.

The output layer may be packed for the CPU's kernels or rounded, and then its weight can't be read: it is applied to unit
vectors instead, which gives the same rows whatever the layer is made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

UNITS = 64  # unit vectors at once: bounds the memory to some 64 · V numbers


@torch.inference_mode()
def output_rows(module: Any, tokens: Tensor, width: int) -> nn.Linear:
    """A linear layer with the rows of the model's output layer for `tokens` (int64 [T]), frozen. [.., width] → [.., T]"""
    head = module.get_output_embeddings()
    dtype, device = module.dtype, module.device
    units = torch.eye(width, dtype=dtype, device=device)
    offset = head(torch.zeros(1, width, dtype=dtype, device=device))[:, tokens]
    columns = [head(part)[:, tokens] - offset for part in units.chunk(-(-width // UNITS))]
    bias = bool(offset.any())
    with torch.inference_mode(False):
        rows = nn.Linear(width, len(tokens), bias=bias, dtype=dtype, device=device).requires_grad_(False)
    rows.weight.data.copy_(torch.cat(columns).T)
    if bias:
        rows.bias.data.copy_(offset[0])
    return rows
