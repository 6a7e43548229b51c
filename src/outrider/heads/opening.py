"""From a folder to a head that drafts for a target, or a line about why it can't."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from outrider.errors import ModelError, ParameterError
from outrider.heads.autoregressive import AutoregressiveModel
from outrider.heads.blockwise import BlockwiseModel
from outrider.heads.config import HeadConfig
from outrider.heads.engine import HeadModel
from outrider.heads.parts import parts_of
from outrider.heads.published.eagle import usual_layers
from outrider.heads.stored import read_shape
from outrider.models.base import HandsOutStates
from outrider.models.weights.quantized import can_quantize

HEAD_DTYPES = ("auto", "float", "int8")
"""Of a head's weights: "float", the target's states' type; "int8"; "auto", in 8 bits on a CPU with kernels for it, unless
the target is in float64, which is for checking, or float16. Quantizing changes what is proposed, never the law of what is
accepted."""


def check_fits(target: HandsOutStates, config: HeadConfig) -> None:
    """Raise `ModelError` unless states and tokens of the target are those that the head was made for."""
    ours = (target.state_size, target.vocab_size)
    if ours != (config.target_width, config.vocab_size):
        raise ModelError(
            f"the draft head for {config.target} can't draft for {target.name}: it was made for states of "
            f"{config.target_width} and {config.vocab_size} tokens, not {ours[0]} and {ours[1]}; train one with outrider "
            "train head"
        )


def check_dtype(dtype: str) -> None:
    """Raise `ParameterError` unless a head's weights can be asked for so."""
    if dtype not in HEAD_DTYPES:
        raise ParameterError(f"draft head's dtype must be {', '.join(HEAD_DTYPES[:-1])} or {HEAD_DTYPES[-1]}, got {dtype!r}")


def _quantizes(dtype: str, target: HandsOutStates) -> bool:
    """Whether the weights of a head are to be in 8 bits. Raises `ModelError` if they can't be."""
    check_dtype(dtype)
    possible = target.device.type == "cpu" and can_quantize()
    if dtype == "int8" and not possible:
        raise ModelError(
            f"draft head can't be quantized to int8 on {target.device}: it needs a CPU and a torch build with kernels for "
            "it; leave the head's dtype out"
        )
    usual = target.quantized or target.state_dtype in (torch.float32, torch.bfloat16)
    return possible and (dtype == "int8" or (dtype == "auto" and usual))


def _of_usual_layers(target: HandsOutStates, config: HeadConfig) -> HeadConfig:
    layers = usual_layers(target.num_layers)
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise ModelError(
            f"the draft head for {config.target} can't draft for {target.name}: it reads the states of layers "
            f"{', '.join(map(str, layers))} of a target with {target.num_layers} unless its config names others"
        )
    return replace(config, layers=layers)


def open_head(target: HandsOutStates, folder: Path, dtype: str = "auto") -> HeadModel:
    """The head in a folder, for this target. dtype: of its weights, one of `HEAD_DTYPES`."""
    config = read_shape(folder)
    check_fits(target, config)
    if config.published is not None and config.published.reads and not config.layers:
        config = _of_usual_layers(target, config)
    quantized = _quantizes(dtype, target)
    parts = parts_of(target, folder, torch.float32 if quantized else target.state_dtype, quantized)
    make = AutoregressiveModel if config.kind == "autoregressive" else BlockwiseModel
    return make(target, config, parts)
