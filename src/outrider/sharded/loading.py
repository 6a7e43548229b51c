"""This rank's part of a model: sharded by transformers' plan, or whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.models.cache.masks import has_recurrent_layers
from outrider.models.cut_head import draft_tokens
from outrider.models.dtypes import native_dtype, parse_dtype
from outrider.models.loading import load_transformers
from outrider.models.pretrained import model_errors, without_bars
from outrider.models.sources import folder_of
from outrider.models.transformers_model import TransformersModel
from outrider.sharded.linear import Spent, localise
from outrider.sharded.model import Whole

_REMEDY = "use an architecture that has one (Llama, Qwen, Mistral, Gemma, Phi, GPT-NeoX, …), or one process"
_ATTENTION = ("attn", "attention")


def check_kind(dtype: str, engine: str) -> None:
    """Refuse what can't be sharded: transformers' plans are for its own layers in floating point."""
    if engine not in ("auto", "transformers"):
        raise ParameterError(
            f"engine must be transformers with tensor parallelism, got {engine!r}: leave it out, or run one process"
        )
    if dtype in ("int8", "int4"):
        raise ParameterError(f"dtype must be a floating-point type with tensor parallelism, got {dtype!r}: use bfloat16")
    parse_dtype(dtype)


def find(model: str | Path | None, dtype: str, device: torch.device) -> tuple[str | Path, str]:
    """The folder or hub name to load from, and the name in messages; a GGUF file is converted."""
    return folder_of(model, parse_dtype(dtype) or native_dtype(device))


def plan_of(source: str | Path, name: str, ranks: int) -> dict[str, str]:
    """The plan by which a model is cut over so many ranks: transformers' own, attention left whole where heads don't divide.

    Raises `ModelError` for an architecture without a plan.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"model {name} can't be loaded: {in_one_line(error)}") from error
    if has_recurrent_layers(config.get_text_config()):
        raise ModelError(f"{name} ({config.model_type}) can't be sharded: it has recurrent layers; {_REMEDY}")
    plan = dict(getattr(skeleton, "tp_plan", None) or {})
    if not plan:
        raise ModelError(
            f"{name} ({config.model_type}) can't be sharded: transformers has no tensor-parallel plan; {_REMEDY}"
        )
    if heads_divide(config, ranks):
        return plan
    return plan | {key: "replicate" for key in plan if _is_attention(key)}


def heads_divide(config: Any, ranks: int) -> bool:
    """Whether each rank can have whole heads: those of the queries and those of the keys."""
    config = config.get_text_config()
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    return heads % ranks == 0 and groups % ranks == 0


def _is_attention(key: str) -> bool:
    return any(word in part for part in key.split(".")[:-1] for word in _ATTENTION)


def load_part(source: str, name: str, dtype: str, plan: dict[str, str] | None, pack: bool) -> Whole:
    """Load this rank's part; all ranks call it together. plan: None for a whole model on every rank."""
    spent = Spent()
    if plan is None:
        return Whole(load_transformers(source, dtype=dtype, device=_device(), pack=pack), spent, None)
    module, tokenizer = _sharded(source, name, parse_dtype(dtype), plan)
    cut = localise(module, plan, spent, pack)
    return Whole(TransformersModel(module, tokenizer, name), spent, cut)


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _sharded(source: str, name: str, dtype: torch.dtype | None, plan: dict[str, str]) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.distributed import DistributedConfig

    with without_bars(), model_errors(name):
        if draft_tokens(AutoConfig.from_pretrained(source), name) is not None:
            raise ModelError(
                f"{name} drafts some tokens only, which can't be sharded: use draft_placement replicated or rank0"
            )
        config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
        module = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", distributed_config=config)
        return module, AutoTokenizer.from_pretrained(source)
