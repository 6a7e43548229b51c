"""Which models can be speculated with: those that can forget. Checked when a model is opened, never half-way."""

from __future__ import annotations

from typing import Any

from outrider.errors import ModelError
from outrider.models.attention.in_blocks import BLOCKS
from outrider.models.attention.in_float64 import STEADY
from outrider.models.attention.shared_keys import SHARED_KEYS
from outrider.models.cache.masks import has_recurrent_layers
from outrider.models.kernels.attention import KERNEL


def refuse_without_rollback(model: Any, name: str, has_encoder: bool = False, keeps_states: bool = False) -> None:
    """Raise `ModelError`, naming the model and the reason, if rejected tokens could not be taken back.

    has_encoder: whether the engine that asks takes encoder-decoder models, and no others. keeps_states: whether it can go
    back to earlier states of recurrent layers.
    """
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    remedy = "use a decoder-only model with attention (Llama, Qwen, GPT-2, …) or layers such as Mamba 2's or LFM 2's"
    if bool(getattr(config, "is_encoder_decoder", False)) is not has_encoder:
        what = "a decoder-only model" if has_encoder else "an encoder-decoder model"
        raise ModelError(f"{name} ({kind}) can't be used here: it is {what}; outrider.load opens either kind")
    recurrent = has_recurrent_layers(config.get_text_config())
    if recurrent and not keeps_states:
        raise ModelError(
            f"{name} ({kind}) can't be used here: it has recurrent layers, which the transformers engine alone takes "
            "(outrider.load opens it there); leave the engine out"
        )
    if getattr(model, "_is_stateful", False) and not recurrent:
        raise ModelError(
            f"{name} ({kind}) can't be used: its recurrent state can't be rolled back, and speculation discards "
            f"rejected tokens; {remedy}"
        )
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise ModelError(f"{name} ({kind}) can't be used: it has no language-model head; {remedy}")
    if getattr(config, "_attn_implementation", "") not in ("sdpa", "eager", KERNEL, STEADY, BLOCKS, SHARED_KEYS):
        raise ModelError(
            f"{name} ({kind}) can't be used with attn_implementation={config._attn_implementation!r}: it takes no mask "
            "per row; load it with attn_implementation='sdpa'"
        )
    if kind in ("gpt_neo", "doge"):
        raise ModelError(
            f"{name} ({kind}) can't be used: its attention window depends on the other rows of a batch; {remedy}"
        )
    if getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        raise ModelError(f"{name} ({kind}) can't be used: it derives positions from padding (ALiBi); {remedy}")
