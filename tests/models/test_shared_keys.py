"""Attention for heads that share keys: the numbers of transformers' own, in ragged batches, windows and whole prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.models.attention.shared_keys import SHARED_KEYS, _kept, use_shared_keys
from outrider.models.transformers_model import TransformersModel
from tests.helpers.ragged import reference, score, some_tokens
from tests.helpers.tiny_models import module

UNEVEN: dict[str, Any] = {  # layers that see all share one key, windows share two
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}
SHARING = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma3", "Phi3", "Starcoder2", "Cohere", "Granite", "Gemma4"]


def whole(architecture: str) -> Any:
    return module(architecture, **(UNEVEN if architecture == "Gemma4" else {}))


def sharing(architecture: str) -> TransformersModel:
    made = whole(architecture)
    assert use_shared_keys(made)
    return TransformersModel(made, name=f"sharing-{architecture}")


@pytest.mark.parametrize("architecture", SHARING)
def test_logits_are_those_of_transformers_attention(architecture: str) -> None:
    """Prompts of several lengths read at once, then passes of one to five tokens in turn, rows of their own lengths."""
    model, plain = sharing(architecture), TransformersModel(whole(architecture), name="plain")
    rows = [model.open() for _ in range(3)]
    held: list[list[int]] = [[], [], []]
    for step, counts in enumerate([(9, 3, 14), (1, 70, 1), (1, 1, 1), (5, 1, 2), (1, 4, 1), (2, 2, 2), (1, 1, 1)]):
        new = [some_tokens(count, 10 * step + i) for i, count in enumerate(counts)]
        got = score(model, rows, new)
        for i, part in enumerate(new):
            held[i] += part
            wanted = reference(plain, held[i])[-len(part) :]
            torch.testing.assert_close(got[i], wanted, atol=1e-10, rtol=0)
    for row in rows:
        row.close()


def test_passes_of_two_models_in_turn_keep_their_own_masks() -> None:
    first, second = sharing("Llama"), sharing("Qwen2")
    texts = {first: some_tokens(11, 1), second: some_tokens(20, 2)}
    opened = {model: model.open() for model in texts}
    for start in range(0, 10, 2):
        for model, tokens in texts.items():
            got = score(model, [opened[model]], [tokens[start : start + 2]])[0]
            plain = TransformersModel(module("Llama" if model is first else "Qwen2"), name="plain")
            torch.testing.assert_close(got, reference(plain, tokens[: start + 2])[-2:], atol=1e-10, rtol=0)


def test_masks_are_kept_for_one_pass_of_ours() -> None:
    """Elsewhere a mask may be written to and used again, or be asked for its gradient."""
    model, plain = sharing("Llama"), module("Llama")
    score(model, [model.open()], [some_tokens(5, 0)])
    assert _kept == [()]
    tokens = torch.tensor([some_tokens(6, 1)])
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    for low in (-3.0, -torch.inf):
        mask.masked_fill_(torch.ones(6, 6, dtype=torch.bool).triu(1), low)
        got = model.module(tokens, attention_mask=mask).logits
        torch.testing.assert_close(got, plain(tokens, attention_mask=mask).logits, atol=1e-10, rtol=0)
    got.sum().backward()


def test_dropout_is_left_to_transformers() -> None:
    made = module("Llama", attention_dropout=0.5)
    assert use_shared_keys(made)
    made.train()
    tokens = torch.tensor([some_tokens(6, 1), some_tokens(6, 2)])
    mask = torch.ones(2, 6, dtype=torch.long).index_fill_(1, torch.tensor([0]), 0)
    first, second = (made(tokens, attention_mask=mask).logits for _ in range(2))
    assert (first - second).abs().max() > 1e-3


def test_models_whose_heads_share_nothing_are_left_as_they_are() -> None:
    made = module("GPT2")
    assert not use_shared_keys(made)
    assert made.config._attn_implementation == "sdpa"


def test_loaded_models_have_it(target_folder: Path) -> None:
    model = outrider.load(target_folder, dtype="float32")
    assert isinstance(model, TransformersModel)
    assert model.module.config._attn_implementation == SHARED_KEYS
