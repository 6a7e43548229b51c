"""Which engine opens a module of transformers."""

from __future__ import annotations

from typing import Any

from outrider.models.cache.masks import has_recurrent_layers
from outrider.models.transformers_model import TransformersModel


def engine_kind(module: Any) -> type[TransformersModel]:
    """Imported when it is needed: most models are the first kind."""
    if getattr(module.config, "is_encoder_decoder", False):
        from outrider.models.encoder_decoder import EncoderDecoderModel

        return EncoderDecoderModel
    if has_recurrent_layers(module.config.get_text_config()):
        from outrider.models.recurrent.model import RecurrentModel

        return RecurrentModel
    return TransformersModel
