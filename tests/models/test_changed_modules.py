"""A module that is not what its engine was opened around: refused in one line, instead of another text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider.decode import Request, decode
from outrider.errors import ParameterError
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.tiny_models import module


def greedy(model: TransformersModel) -> list[int]:
    tokens, _ = decode(model, [Request([3, 1, 4], 12, RandomStream(0))], SamplingSettings(temperature=0.0))
    return tokens[0]


def with_one_token_more(made: Any) -> None:
    made.resize_token_embeddings(made.config.vocab_size + 1)


CHANGES: dict[str, tuple[Callable[[Any], object], str, Callable[[Any], object]]] = {
    "training": (lambda made: made.train(), "in training mode, with dropout", lambda made: made.eval()),
    "training in part": (lambda made: made.transformer.h[0].train(), "in training mode", lambda made: made.eval()),
    "dropout in training": (
        lambda made: made.transformer.h[1].mlp.dropout.train(),
        "in training mode",
        lambda made: made.eval(),
    ),
    "type": (
        lambda made: made.double(),
        "was opened with dtype torch.float32 and has torch.float64 by now: open it anew",
        lambda made: made.float(),
    ),
    "vocabulary": (
        with_one_token_more,
        r"was opened with embeddings \(\d+, \d+\) and has",
        lambda made: made.resize_token_embeddings(made.config.vocab_size - 1),
    ),
    "attention": (
        lambda made: made.set_attn_implementation("eager"),
        "was opened with attention sdpa and has eager",
        lambda made: made.set_attn_implementation("sdpa"),
    ),
}


@pytest.mark.parametrize("key", ["sliding_window", "max_position_embeddings"])
def test_windows_and_positions_are_seen_as_well(key: str) -> None:
    made = module("Mistral", dtype=torch.float32, sliding_window=7)
    model = TransformersModel(made, name="mine")
    before, was = greedy(model), getattr(made.config, key)
    setattr(made.config, key, 4)
    said = {
        "sliding_window": "with windows {'full_attention': 7} and has {'full_attention': 4} by now",
        "max_position_embeddings": f"with positions {was} and has 4 by now",
    }
    with pytest.raises(ParameterError, match=said[key]):
        greedy(model)
    setattr(made.config, key, was)
    assert greedy(model) == before


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recorded", [False, True])
def test_it_is_seen_when_the_next_sequence_is_opened(change: str, recorded: bool) -> None:
    turn, said, back = CHANGES[change]
    made = module("GPT2", dtype=torch.float32)
    model = TransformersModel(made, name="mine")
    if recorded:
        model.record()
    before = greedy(model)
    turn(made)
    with pytest.raises(ParameterError, match=said) as error:
        greedy(model)
    assert "\n" not in str(error.value)
    assert not model._open
    back(made)
    assert greedy(model) == before
    turn(made)
    made.eval()
    assert len(greedy(TransformersModel(made))) == 12  # opened anew it goes on
