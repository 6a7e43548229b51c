"""One forward pass of a model of transformers as a graph (`tracing`), for tokens of one row or several and any context.

The graph is about tokens [R, N] at positions [R, N], if its width is open in columns [R, N] of the cache, and what else
models read: an encoder-decoder its sources' keys and values, recurrent layers their states. It returns logits [R, N, V], the
hidden states asked for, each [R, N, width], and what recurrent layers leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.models.attention.in_blocks import describe_attention
from outrider.models.attention.shared_keys import masks_made_once
from outrider.models.base import LAST
from outrider.models.hidden_states import Put, caught
from outrider.models.passes.guards import Sizes
from outrider.models.passes.model_code import describe_code
from outrider.models.passes.tracing import Inputs, Traced, parts_of, trace

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel


def describe_pass(model: TransformersModel) -> list[object]:
    """What a graph depends on, the values of its inputs and the versions of libraries apart."""
    config = model.module.config
    about: list[object] = [config.to_json_string(), config._attn_implementation, model.dtype_name, model.max_length]
    # A view of the first layers reads the whole cache: the same layers of a deeper model are another graph.
    about += [str(model._cache.kept_dtype), len(model._cache.layers), describe_attention(model.module)]
    return [*about, *model.states_described(), *describe_code(model.module), *parts_of(model.module).describe()]


def trace_pass(
    model: TransformersModel, width: int | None, layers: Sequence[int] = (LAST,), several: bool = False
) -> Traced:
    """The pass of `width` tokens, None for any number up to `WIDEST`, that hands out the states of these layers.

    several: of any number of rows, one otherwise. Raises whatever the model's code raises where it can't be traced.
    """
    recorded = width is None or model.keeps_states  # compiled otherwise
    apart = width is None and not model.keeps_states  # where states are kept no token is scored in another one's place

    def about(of: Sizes) -> list[Tensor]:
        count = 3 if apart else 2
        tokens = [torch.empty((of.rows, of.tokens), dtype=torch.long, device=model.device) for _ in range(count)]
        return tokens + model.source_like(of.rows, of.source)

    return trace(partial(run_pass, model, layers, apart), about, model, width, several, fills=recorded)


def run_pass(model: TransformersModel, layers: Sequence[int], apart: bool, given: Inputs) -> tuple[Tensor, ...]:
    """The pass that is traced, or captured. apart: tokens may lie in other columns than their positions are."""
    tokens, positions, *rest = given.about
    at, source = (rest[0], rest[1:]) if apart else (positions, rest)
    states: dict[int, Tensor] = {}
    catching: dict[int, Put] = {layer: partial(states.__setitem__, layer) for layer in layers}
    cache = model.traced_cache(given.layers(at), source, tokens.shape[1])
    with caught(model.module, catching), masks_made_once(), model.placed(positions, given.columns, cache):
        arguments = model.pass_arguments(tokens, positions, given.columns, cache, source, at if apart else None)
        out = torch.func.functional_call(model.module, given.tensors, kwargs=arguments)
    return out.logits, *(states[layer] for layer in layers), *model.left_in(cache)
