"""Calls of transformers' `generate` through the drop-in, and prompts for them."""

from __future__ import annotations

from typing import Any

import torch

import outrider

IDS = torch.tensor([[5, 6, 7, 5, 6]])
PADDED = torch.tensor([[0, 0, 9, 10, 11], [5, 6, 7, 5, 6]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def ours(model: Any, *args: Any, **kwargs: Any) -> Any:
    """`model.generate` by our decoding."""
    return model.generate(*args, custom_generate=outrider.transformers_generate, **kwargs)
