"""One forward pass of a model of transformers as a graph (`tracing`), for tokens of one row or several and any context.

The graph is about tokens [R, N] at positions [R, N] and, of an encoder-decoder, its sources' keys and values; it returns
logits [R, N, V] and the states asked for, each [R, N, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.models.base import LAST
from outrider.models.hidden_states import Put, caught
from outrider.models.model_code import describe_code
from outrider.models.shared_keys import masks_made_once
from outrider.models.tracing import Inputs, Sizes, Traced, parts_of, trace

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel


def describe_pass(model: TransformersModel) -> list[object]:
    """What a graph depends on, the values of its inputs and the versions of libraries apart."""
    config = model.module.config
    about: list[object] = [config.to_json_string(), config._attn_implementation, model.dtype_name, model.max_length]
    return [*about, *describe_code(model.module), *parts_of(model.module).describe()]


def trace_pass(
    model: TransformersModel, width: int | None, layers: Sequence[int] = (LAST,), several: bool = False
) -> Traced:
    """The pass of `width` tokens, None for any number up to `WIDEST`, that hands out the states of these layers.

    several: of any number of rows, one otherwise. Raises whatever the model's code raises where it can't be traced.
    """

    def about(of: Sizes) -> list[Tensor]:
        tokens = [torch.empty((of.rows, of.tokens), dtype=torch.long, device=model.device) for _ in range(2)]
        return tokens + model.source_like(of.rows, of.source)

    def run(given: Inputs) -> tuple[Tensor, ...]:
        tokens, at, *source = given.about
        states: dict[int, Tensor] = {}
        catching: dict[int, Put] = {layer: partial(states.__setitem__, layer) for layer in layers}
        cache = Cache(layers=given.layers(at))
        with caught(model.module, catching), masks_made_once(), model.placed(at, given.columns):
            arguments = model.pass_arguments(tokens, at, given.columns, cache, source)
            out = torch.func.functional_call(model.module, given.tensors, kwargs=arguments)
        return out.logits, *(states[layer] for layer in layers)

    return trace(run, about, model, width, several)
