"""How a model of transformers gets an attention of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register_attention(name: str, attend: Callable[..., Any]) -> None:
    """Tell transformers of a function, with masks as torch's own attention has them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)


def give_attention(module: Any, name: str, attend: Callable[..., Any]) -> bool:
    """Register a function under a name and give it to a model.

    → whether the model has it now: some do not let their attention be replaced.
    """
    register_attention(name, attend)
    module.set_attn_implementation(name)
    return bool(module.config._attn_implementation == name)
