"""Sources for tiny encoder–decoders, a checkpoint's own rules, and recordings."""

from __future__ import annotations

import json
import struct
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.cli.main import run
from outrider.models.base import Source
from outrider.models.encoder_decoder import EncoderDecoderModel
from tests.helpers.ragged import some_tokens
from tests.helpers.tiny_models import module

FOUR = ("T5", "Bart", "Marian", "Whisper")


def some_source(model: EncoderDecoderModel, seed: int, length: int = 11) -> Source:
    if not model.hears:
        return some_tokens(length, 100 + seed, model.vocab_size)
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


RULES: dict[str, dict[str, Any]] = {
    "T5": {"no_repeat_ngram_size": 2, "bad_words_ids": [[7], [9, 11]], "min_length": 6, "sequence_bias": [[[10], 3.0]]},
    "Bart": {"no_repeat_ngram_size": 2, "forced_bos_token_id": 5, "min_length": 9, "min_new_tokens": 5},
    "Marian": {"no_repeat_ngram_size": 2, "bad_words_ids": [[0]], "forced_eos_token_id": 2},
    "Whisper": {"no_repeat_ngram_size": 2, "suppress_tokens": [4, 8, 15, 16, 23, 42], "begin_suppress_tokens": [10, 20, 2]},
}


@cache
def ruled(architecture: str) -> EncoderDecoderModel:
    """With a generation config that forbids and forces tokens, as released checkpoints have them."""
    model = EncoderDecoderModel(module(architecture), name=f"ruled-{architecture}")
    for name, value in RULES[architecture].items():
        setattr(model.module.generation_config, name, value)
    return model


SOURCE = "the quick brown fox jumps over the lazy dog"
RATE = 16000


def write_wav(path: Path, samples: Any, rate: int = RATE, width: int = 2, channels: int = 1) -> Path:
    """Samples in [-1, 1) as PCM."""
    scaled = np.asarray(samples, np.float64) * 2.0 ** (8 * width - 1)
    if width == 1:
        raw = (scaled + 128).astype(np.uint8).tobytes()
    else:
        whole = scaled.astype("<i4")
        raw = b"".join(struct.pack("<i", value)[:width] for value in whole.tolist())
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return path


def tone(seconds: float = 0.5) -> Any:
    at = np.arange(int(RATE * seconds)) / RATE
    return 0.5 * np.sin(2 * np.pi * 440 * at) + 0.2 * np.sin(2 * np.pi * 1320 * at)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    parsed: dict[str, Any] = json.loads(out.splitlines()[-1])
    return parsed
