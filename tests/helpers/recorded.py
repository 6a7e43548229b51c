"""Tiny models with recorded passes beside the same with ordinary ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.models.attention.shared_keys import use_shared_keys
from outrider.models.kinds import engine_kind
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import pack_linears
from outrider.models.weights.quantized import can_quantize, quantize_to_int8
from outrider.prefill import prefill
from tests.helpers.ragged import score
from tests.helpers.tiny_models import module, record_now

KINDS = ["float32", "bfloat16", *(["int8"] if can_quantize() else [])]


def made(architecture: str, kind: str = "float32", **overrides: Any) -> TransformersModel:
    """As `load` makes them."""
    found = module(architecture, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32, **overrides)
    if kind == "int8":
        quantize_to_int8(found)
    else:
        pack_linears(found)
        use_shared_keys(found)
    return engine_kind(found)(found, name=f"tiny-{architecture}")


def pair(architecture: str, kind: str = "float32", **overrides: Any) -> tuple[TransformersModel, TransformersModel]:
    """An ordinary model and the same one with recorded passes."""
    ordinary, quick = (made(architecture, kind, **overrides) for _ in range(2))
    record_now(quick)
    assert quick.recorded is not None
    return ordinary, quick


def scored(model: TransformersModel, row: list[int], start: int, widths: Sequence[int]) -> list[Tensor]:
    """The logits of passes one after the other, each after one of wrong tokens that is taken back."""
    sequence = model.open()
    prefill(model, [sequence], [row[:start]])
    found = []
    for width in widths:
        at = sequence.length
        score(model, [sequence], [[3 + token % 50 for token in row[at : at + width]]])
        sequence.truncate(at)
        found += score(model, [sequence], [row[at : at + width]])
    sequence.close()
    return found
