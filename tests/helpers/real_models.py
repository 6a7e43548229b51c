"""The real default model in float32 and a draft made from it, for tests that need real text."""

from __future__ import annotations

import copy
from functools import cache

from torch import nn

from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel


@cache
def smollm2() -> TransformersModel:
    """SmolLM2-135M-Instruct in float32."""
    return load_transformers(dtype="float32", device="cpu")


@cache
def pruned_draft(dropped: tuple[int, ...] = (24,)) -> TransformersModel:
    """The default model without some of its 30 layers: a draft that agrees often (0.7 at temperature 1), but not always."""
    target = smollm2()
    module = copy.deepcopy(target.module)
    kept = [layer for i, layer in enumerate(module.model.layers) if i not in dropped]
    for i, layer in enumerate(kept):
        layer.self_attn.layer_idx = i
    module.model.layers = nn.ModuleList(kept)
    module.config.num_hidden_layers = len(kept)
    return TransformersModel(module, target.tokenizer, "SmolLM2-pruned")
