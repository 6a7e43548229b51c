"""A transformers model as an OpenVINO graph whose attention is marked.

The marks survive being saved, which OpenVINO's paged attention itself does not; `paged` puts it in their place when the
graph is opened. Marks are slices of [query, key, value], named, so that every shape in the graph is right as it stands.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from outrider.errors import ModelError, in_one_line
from outrider.models.base import LAST
from outrider.models.cache.masks import attention_pattern
from outrider.models.hidden_states import body_layers, caught
from outrider.models.limits import context_limit
from outrider.models.openvino.attention import NAME, OPERATION, register
from outrider.models.rollback import refuse_without_rollback

MARK = "outrider.attention."
LOGITS, EMBEDDINGS = "logits", "embeddings"
LONGEST_CHECK = 1024  # windows up to this are checked beyond their end
REMEDY = "use engine transformers"
_log = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of the logits' spread, in float32: reordered sums give 1e-5, a mask or position overlooked 0.1 and more


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer. window: 0 if it sees everything. sizes: of a head."""

    scale: float
    window: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int


def state_name(layer: int) -> str:
    """Of the output with the states after a layer."""
    return f"state.{layer}"


def trace(module: Any, name: str) -> tuple[Any, list[AttentionLayer]]:
    """An `openvino.Model` with inputs input_ids [1, T], position_ids [1, T] and keep [K], and outputs logits [1, K, V],
    embeddings [1, T, W], state.0 [1, T, W], the last states, and state.i, those after its other layers.

    module: in float32 on the CPU; left with another attention. Raises `ModelError`, naming the model, for one whose
    attention can't be marked, or which computes something else with it.
    """
    refuse_without_rollback(module, name)
    attention_pattern(module.config.get_text_config(), name)
    register()
    kind = module.config.model_type
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise ModelError(f"{name} ({kind}) can't be converted for OpenVINO: it has no logits_to_keep; {REMEDY}")
    try:
        _check(module)
        return _convert(module)
    except ModelError as error:
        reason = str(error)
    except Exception as error:  # the tracer and the front end raise whatever a model leads them to
        reason = in_one_line(error, 200)
        _log.debug("conversion failed", exc_info=True)
    raise ModelError(f"{name} ({kind}) can't be converted for OpenVINO: {reason}; {REMEDY}")


@torch.inference_mode()
def _check(module: Any) -> None:
    """That the marked attention is all there is: the same logits as the model's own, and a mark in every layer."""
    config = module.config.get_text_config()
    limit, window = min(int(config.vocab_size), 50), getattr(config, "sliding_window", None) or 0
    length = min(max(24, window + 8) if window <= LONGEST_CHECK else 24, context_limit(config) or 24)
    tokens = torch.tensor([[(7 * i + 3) % limit for i in range(length)]])
    own = module(input_ids=tokens, use_cache=False).logits.double()
    module.set_attn_implementation(NAME)
    if module.config._attn_implementation != NAME:
        raise ModelError("its attention can't be replaced")
    marked = module(input_ids=tokens, position_ids=torch.arange(length)[None], use_cache=False).logits.double()
    off = float((marked - own).square().mean().sqrt() / own.std().clamp(min=1e-30))
    if not off <= _TOLERANCE:
        raise ModelError(f"with paged attention its logits would be off by {off:.2g} of their spread")


class _Flat(torch.nn.Module):
    """What is traced: logits of the kept positions only, the embeddings, and the states after the layers `wanted`."""

    def __init__(self, module: Any, wanted: list[int]) -> None:
        super().__init__()
        self.module = module
        self.wanted = wanted

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states: dict[int, torch.Tensor] = {}
        embedded: list[torch.Tensor] = []
        hook = self.module.get_input_embeddings().register_forward_hook(lambda _m, _a, out: embedded.append(out))
        with caught(self.module, {layer: partial(states.__setitem__, layer) for layer in self.wanted}):
            out = self.module(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=keep)
        hook.remove()
        return (out.logits, embedded[0], *(states[layer] for layer in self.wanted))


def _convert(module: Any) -> tuple[Any, list[AttentionLayer]]:
    """By the front end itself: `openvino.convert_model` would report to a telemetry service."""
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch import ConversionExtension
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    layers: list[AttentionLayer] = []
    body = body_layers(module)
    states = [LAST, *range(1, len(body) if body is not None else 1)]
    example = (torch.ones(1, 4, dtype=torch.long), torch.arange(4)[None], torch.arange(4))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracers warn about every Python condition
        decoder = TorchScriptPythonDecoder(_Flat(module, states), example_input=example, trace_kwargs={"check_trace": False})
    front = FrontEndManager().load_by_framework("pytorch")
    front.add_extension(ConversionExtension(OPERATION, lambda context: _mark(context, layers)))
    graph = front.convert(front.load(decoder))
    for given, name in zip(graph.inputs, ("input_ids", "position_ids", "keep"), strict=True):
        given.get_tensor().set_names({name})
    for made, name in zip(graph.outputs, (LOGITS, EMBEDDINGS, *(state_name(layer) for layer in states)), strict=True):
        made.get_tensor().set_names({name})
    wanted = int(module.config.get_text_config().num_hidden_layers)
    if len(layers) != wanted:
        raise ModelError(f"{len(layers)} of its {wanted} layers have attention that can be paged")
    return graph, layers


def _mark(context: Any, layers: list[AttentionLayer]) -> Any:
    from openvino import opset13 as ops

    query, key, value = (context.get_input(i) for i in range(3))
    scale, window, heads, kv_heads, key_size, value_size = (context.get_values_from_const_input(i) for i in range(3, 9))
    both = ops.concat([query, key, value], 1)
    cut = ops.slice(both, np.array([0]), np.array([heads * value_size]), np.array([1]), np.array([1]))
    cut.set_friendly_name(f"{MARK}{len(layers)}")
    layers.append(AttentionLayer(float(scale), int(window), int(heads), int(kv_heads), int(key_size), int(value_size)))
    return cut.outputs()
