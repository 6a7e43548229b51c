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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError, ParameterError
from outrider.models.base import TextModel
from outrider.models.compatibility import check_same_tokens
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import check_readable
from outrider.train.neurons import check_adds, narrowed
from outrider.train.states import TOLERANCE, rows_off

_PARTS = ("gate_proj", "up_proj", "down_proj")
Bar = Callable[[Iterable[int], str, str], None]


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
    check_same_tokens(target, body)
    check_readable(body.module, f"body {body.name}")
    _check_head(body)
    whole = _size(body)
    if size is not None and not 1 <= size <= whole:
        raise ParameterError(f"intermediate_size must be in 1 … {whole}, the neurons of {body.name}, got {size}")
    if size is not None and size < whole:
        check_adds(_layers(body), body.module, torch.arange(min(8, body.vocab_size)))


def make_narrow(body: TransformersModel, size: int | None, windows: Iterable[Tensor], bar: Bar) -> NarrowStudent:
    """A student of a body's module, which is used up, in float32, with `size` neurons a layer; embeddings and head frozen.

    windows: of tokens [L] each, on which neurons are chosen; without any the first are left, for weights that come from
    elsewhere. Raises as `check_body` does.
    """
    module = body.module
    if size is not None and size < _size(body):
        bar(narrowed(_layers(body), module, size, list(windows)), f"Narrowing {body.name}", "layers")
    config = copy.deepcopy(module.config)
    config.get_text_config().intermediate_size = _size(body)
    student = type(module)(config)  # without what loading did to the body
    student.load_state_dict(module.state_dict())
    student.generation_config = copy.deepcopy(module.generation_config)
    student = student.float()
    for frozen in (student.get_input_embeddings(), student.get_output_embeddings()):
        frozen.requires_grad_(False)
    return NarrowStudent(student).train()


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
    kind = isinstance(layers, nn.ModuleList) and all(
        hasattr(layer, "post_attention_layernorm")
        and all(type(getattr(getattr(layer, "mlp", None), part, None)) is nn.Linear for part in _PARTS)
        for layer in layers
    )
    if not kind or len({layer.mlp.down_proj.in_features for layer in layers}) != 1:
        raise ModelError(f"{body.name} can't be narrowed: its layers are not of Llama's kind; name another body")
    return layers
