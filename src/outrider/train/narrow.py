"""A deep and narrow student: a model of the target's family with fewer neurons in the network of each layer.

A smaller model of the family is right more often than what can be trained here from little, but its step is what limits
the whole: c = .25 for Qwen2.5-Coder-0.5B beside the 1.5B, both in 4 bits. Nine tenths of what a step reads of its layers
are the networks' gates, ups and downs; leaving out layers instead ruins it (EXPERIMENTS.md, "A student of another model's
neurons").

Which neurons, and what is made of them: `neurons`. What training starts from is right in more than half of its tokens
where a third of the neurons is left.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError, ParameterError
from outrider.models.base import TextModel
from outrider.models.compatibility import check_same_tokens
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import check_readable
from outrider.train.neurons import check_adds, narrowed
from outrider.train.states import TOLERANCE, Bar, rows_off
from outrider.train.student_module import student_module

_PARTS = ("gate_proj", "up_proj", "down_proj")
_SEEN = 4096  # bytes of each weight that tell one body from another


def no_bar(steps: Iterable[int], title: str, unit: str) -> None:
    """Take the steps without a word."""
    del title, unit
    for _ in steps:
        pass


class NarrowStudent(nn.Module):
    """module: of the body's class, narrowed. Trained: its layers and the final norm."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        """Its last states, which its own head reads. [B, L] → [B, L, W]"""
        out: Tensor = self.module.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return out

    def whole(self) -> Any:
        """The module, as it is saved and drafts."""
        return self.module


def check_body(target: TextModel, body: TextModel, size: int | None) -> None:
    """Raise `ParameterError`, `ModelError` or `VocabularyMismatchError` unless a body can be narrowed for a target.

    It must have been loaded with `pack=False`. size: neurons that are to be left in each layer, None for all.
    """
    if not isinstance(body, TransformersModel):
        raise ParameterError(f"body must be on the transformers engine, not {body.name}'s: name a folder, hub name or .gguf")
    if isinstance(target, TransformersModel) and target.module is body.module:
        raise ParameterError("body is used up, and can't be the target's own module: load the model once more")
    if body.has_encoder:
        raise ModelError(f"{body.name} can't be a body: it has an encoder; name a decoder-only model")
    if body.draft_tokens is not None:
        raise ModelError(
            f"{body.name} can't be a body: it is a draft of {len(body.draft_tokens)} tokens; name what it was made of"
        )
    check_same_tokens(target, body)
    entries = len(getattr(target, "tokenizer", None) or range(target.vocab_size))
    if body.vocab_size < entries:
        raise ModelError(
            f"{body.name} can't be a body: it has {body.vocab_size} embeddings for a tokenizer of {entries} entries"
        )
    check_readable(body.module, f"body {body.name}")
    _check_head(body)
    if size is None:
        return
    whole = _size(body)
    if not 1 <= size <= whole:
        raise ParameterError(f"intermediate_size must be in 1 … {whole}, the neurons of {body.name}, got {size}")
    if size < whole and not check_adds(_layers(body), body.module, torch.arange(min(8, body.vocab_size))):
        raise ModelError(
            f"{body.name} can't be narrowed: its layers do not just add what their networks say; leave intermediate_size out"
        )


def make_narrow(body: TransformersModel, size: int | None, windows: Iterable[Tensor], bar: Bar) -> NarrowStudent:
    """A student of a body's module, which is used up, in float32, with `size` neurons a layer; embeddings and head frozen.

    windows: of tokens [L] each, on which neurons are chosen; without any the first are left, for weights that come from
    elsewhere. Raises as `check_body` does, and `ModelError` for values that are not finite along the windows.
    """
    module = body.module
    config = copy.deepcopy(module.config)
    if size is not None and size < _size(body):
        bar(narrowed(_layers(body), module, size, list(windows)), f"Narrowing {body.name}", "layers")
        config.get_text_config().intermediate_size = size
    student = student_module(module, config, module.state_dict(), f"{body.name} can't be a body")
    return NarrowStudent(student).train()


def weights_digest(module: nn.Module) -> str:
    """What tells one set of weights from another of the same shape, by the beginning of each."""
    digest = hashlib.sha256()
    for name, weight in module.named_parameters():
        beginning = weight.detach().flatten()[:_SEEN].cpu().contiguous().view(torch.uint8)
        digest.update(name.encode() + beginning[:_SEEN].numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def _check_head(body: TransformersModel) -> None:
    """Raise `ModelError` unless its logits are its output layer on its last states, which is what is trained."""
    tokens = torch.arange(min(8, body.vocab_size), device=body.device).unsqueeze(0)
    states = body.module.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    logits = body.module(input_ids=tokens, use_cache=False).logits
    if type(body.module.get_output_embeddings()) is not nn.Linear or rows_off(body, states, logits) > TOLERANCE:
        raise ModelError(f"{body.name} can't be a body: its logits are not those of a linear layer on its last state")


def _size(body: TransformersModel) -> int:
    """Neurons of each layer. Raises `ModelError` where layers are not of Llama's kind."""
    return int(_layers(body)[0].mlp.down_proj.in_features)


def _layers(body: TransformersModel) -> Any:
    """Raises `ModelError` unless they are of Llama's kind, all of one size."""
    layers: Any = getattr(body.module.get_decoder(), "layers", None)
    kind = isinstance(layers, nn.ModuleList) and all(map(_of_llamas_kind, layers))
    if not kind or len({layer.mlp.down_proj.in_features for layer in layers}) != 1:
        raise ModelError(
            f"{body.name} can't be narrowed: its layers are not of Llama's kind; leave intermediate_size out, or name "
            "another body"
        )
    return layers


def _of_llamas_kind(layer: Any) -> bool:
    """Whether a layer's network is a gate, an up and a down, and nothing else."""
    mlp = getattr(layer, "mlp", None)
    if not hasattr(layer, "post_attention_layernorm") or not isinstance(mlp, nn.Module):
        return False
    linear = all(type(getattr(mlp, part, None)) is nn.Linear for part in _PARTS)
    return linear and {name.partition(".")[0] for name, _ in mlp.named_parameters()} == set(_PARTS)
