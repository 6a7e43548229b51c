"""Folders of tiny models as `save_pretrained` writes them, and cache folders that share what takes long to make."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.bench.toyllm import PROMPT
from outrider.support import cache_folder
from tests.helpers.tiny_models import module

USERS_CACHE = cache_folder._named()
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "def f(x): return x + 1",
    "naïve café 数 🙂 ünïcode",
    "0123456789",
]


def make_tokenizer(extra: str = "") -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every character can be written, most non-ASCII ones in several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, extra], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def save_model(folder: Path, seed: int, extra: str = "", architecture: str = "Llama", **overrides: Any) -> Path:
    """A model folder as `save_pretrained` writes it."""
    tokenizer = make_tokenizer(extra)
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    made = module(architecture, seed, torch.float32, **{**size, **overrides})
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_encoder_decoder(folder: Path, architecture: str, seed: int = 0, **overrides: Any) -> Path:
    """A folder with a tiny encoder–decoder; one that hears gets a feature extractor for windows of a second."""
    tokenizer = make_tokenizer()
    size = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    if architecture == "Whisper":
        size |= {"max_source_positions": 50, "max_target_positions": 256, "decoder_layers": 2}
        extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
        extractor.save_pretrained(folder)
    made = module(architecture, seed, torch.float32, **{**size, **overrides})
    made.generation_config.no_repeat_ngram_size = 2
    made.generation_config._from_model_config = False  # or loading would make it anew
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def share_cache(cache: Path, factory: pytest.TempPathFactory, *more: str) -> Path:
    """A new cache folder that has what all tests of this run have recorded, and the kernels that were compiled
    on this machine: recording each tiny model anew takes minutes, compiling a library seconds in every process.

    more: other folders of the user's cache that it has.
    """
    base = factory.getbasetemp()
    own = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "recorded"
    cache.mkdir(parents=True, exist_ok=True)
    for folder in (own, *(USERS_CACHE / name for name in ("kernels", "sampling", *more))):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (cache / folder.name).symlink_to(folder)
    return cache


def save_gpt2(folder: Path, seed: int, layers: int) -> Path:
    tokenizer = make_tokenizer(PROMPT)
    made = module("GPT2", seed, torch.float32, vocab_size=len(tokenizer), n_positions=128, n_layer=layers)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
