"""What transformers reads of a model: weights, tokenizer, feature extractor; errors in one line, without its bars."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ModelError, in_one_line
from outrider.models.cut_head import draft_tokens
from outrider.support.garbage import uncollected


@contextmanager
def without_bars() -> Iterator[None]:
    """Transformers shows no progress bars of its own: reading, writing and sharding are steps of something longer."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def model_errors(name: str, what: str = "model") -> Iterator[None]:
    """What goes wrong while transformers reads (`what` of) a model is a `ModelError` in one line."""
    from huggingface_hub.utils import logging as hub_logging

    told = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)  # it tells each retry, twice; what came of it is in the error
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"{what} {name} can't be loaded: {in_one_line(error)}") from error
    finally:
        hub_logging.set_verbosity(told)


def read_pretrained(
    source: str | Path, dtype: torch.dtype | None, name: str, decoder_only: str | None = None
) -> tuple[Any, Any]:
    """The model and its tokenizer. decoder_only: the engine that takes no others. Raises `ModelError`."""
    from transformers import AutoConfig, AutoTokenizer

    with without_bars(), model_errors(name):
        config = AutoConfig.from_pretrained(source)
        if decoder_only is not None and getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{name} ({config.model_type}) can't be used by the {decoder_only} engine: it is an encoder-decoder model; "
                "use engine transformers"
            )
        if decoder_only is not None and draft_tokens(config, name) is not None:
            raise ModelError(
                f"{name} drafts some tokens only, which the {decoder_only} engine can't: use the transformers engine for it "
                f"(draft {name}:engine=transformers,dtype=bfloat16)"
            )
        with uncollected():
            importlib.import_module("transformers.modeling_utils")
        module = _model_class(config).from_pretrained(source, dtype=dtype or "auto")
        return module, AutoTokenizer.from_pretrained(source)


def _model_class(config: Any) -> Any:
    """What transformers opens such a model with, its head included."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

    if not getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForCausalLM
    if config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def read_tokenizer(folder: str | Path, name: str) -> Any:
    """The tokenizer without the model. Raises `ModelError`."""
    from transformers import AutoTokenizer

    with model_errors(name, "tokenizer of"):
        return AutoTokenizer.from_pretrained(folder)


def read_feature_extractor(folder: str | Path, name: str) -> Any:
    """What a model that hears makes of sound. Raises `ModelError`."""
    from transformers import AutoFeatureExtractor

    with model_errors(name, "feature extractor of"):
        return AutoFeatureExtractor.from_pretrained(folder)
