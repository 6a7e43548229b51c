"""Masks and positions that the drop-in is given: read as `generate` reads them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from outrider.errors import ParameterError
from tests.helpers.drop_in import IDS, MASK, PADDED, ours
from tests.helpers.tiny_models import CONFIGS, module


@pytest.mark.parametrize(("architecture", "window"), [("Llama", None), ("Mistral", 64), ("Mistral", 7), ("Gemma3", 7)])
@pytest.mark.parametrize("beams", [1, 3])
def test_holes_in_a_prompt_are_seen_as_by_generate(architecture: str, window: int | None, beams: int) -> None:
    """transformers' windows count masked tokens, ours the tokens that are left: refused where they come to differ."""
    windows: dict[str, Any] = {} if window is None else {"sliding_window": window}
    made = module(architecture, **windows)
    ids = torch.arange(5, 17)[None]
    hole, left = torch.ones_like(ids), torch.ones_like(ids)
    hole[:, 7:10], left[:, :3] = 0, 0
    padded = ids.masked_fill(hole == 0, 0)
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 10,
        "num_beams": beams,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    assert torch.equal(ours(made, ids, attention_mask=left, **options), made.generate(ids, attention_mask=left, **options))
    for given, mask in ((ids, {"attention_mask": hole}), (padded, {})):  # of the second `generate` makes the mask itself
        if window == 7:
            with pytest.raises(ParameterError, match="must have no holes with a model that sees 7 tokens"):
                ours(made, given, **mask, **options)
        else:
            assert torch.equal(ours(made, given, **mask, **options), made.generate(given, **mask, **options))


@pytest.mark.parametrize("value", [2, -1, 0.5])
def test_masks_of_other_numbers_are_refused(value: float) -> None:
    """transformers sums them up to positions."""
    model, mask = module("Llama"), torch.full(IDS.shape, value)
    with pytest.raises(ParameterError, match=f"must be 0 where there is padding and 1 elsewhere, got {value}"):
        ours(model, IDS, attention_mask=mask, do_sample=False, max_new_tokens=4, pad_token_id=0)
    for ones in (torch.ones(IDS.shape), torch.ones(IDS.shape, dtype=torch.bool)):
        assert ours(model, IDS, attention_mask=ones, do_sample=False, max_new_tokens=4, pad_token_id=0).shape == (1, 9)


def test_a_model_that_sees_takes_text() -> None:
    """Its positions have several planes."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**CONFIGS["Llama"], "rope_parameters": rope}
    config = Qwen2VLConfig(text_config=text, vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2})
    torch.manual_seed(0)
    made = Qwen2VLForConditionalGeneration(config).double().eval()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(
        ours(made, PADDED, attention_mask=MASK, **options), made.generate(PADDED, attention_mask=MASK, **options)
    )
