"""Tiny models opened in the OpenVINO engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.openvino.convert import converted
from outrider.models.openvino.engine import OpenVinoModel
from outrider.models.openvino.saved import Weights
from outrider.support.device_data import pad_rows
from tests.helpers.tiny_models import module

CLOSE = 2e-3


def opened(architecture: str, weights: Weights = "float32", **overrides: Any) -> tuple[OpenVinoModel, Any]:
    """The engine and the transformers module, in float32."""
    settings = {"max_position_embeddings": 128, **overrides}

    def make() -> Any:
        return module(architecture, dtype=torch.float32, **settings)

    saved = converted(lambda: (make(), None), f"{architecture} {settings}", architecture, weights)
    return OpenVinoModel(saved), make()


def score(model: OpenVinoModel, sequences: list[Any], rows: list[list[int]]) -> list[Tensor]:
    tokens, lengths = pad_rows(rows, model.device)
    out = model.score(sequences, tokens, lengths, "all")
    assert out is not None
    return [out[i, :n].clone() for i, n in enumerate(lengths)]
