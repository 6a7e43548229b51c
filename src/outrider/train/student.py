"""A student of the target's width with few layers: "wide and shallow", since its time goes by depth (Chen, Table 2)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from outrider.errors import ModelError, ParameterError
from outrider.models.packed_linear import OpaqueLinear
from outrider.models.transformers_model import TransformersModel


def make_student(target: TransformersModel, layers: int) -> Any:
    """A module of the target's class with `layers` of its layers, in float32; all but the layers and the final norm frozen.

    The target must have been loaded with `pack=False`.
    """
    module = target.module
    if any(isinstance(part, OpaqueLinear) for part in module.modules()):
        raise ParameterError("a student needs a target whose weights can be read: load it with pack=False and no int8")
    total = int(module.config.get_text_config().num_hidden_layers)
    if not 1 <= layers < total:
        raise ParameterError(f"layers must be in 1 … {total - 1}, got {layers}")
    held = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child) == total]
    if len(held) != 1:
        raise ModelError(f"{target.name} can't be made a student of: its layers are not one list")
    config = copy.deepcopy(module.config)
    config.get_text_config().num_hidden_layers = layers
    kept = [round((i + 1) * total / layers) - 1 for i in range(layers)]
    if getattr(config, "layer_types", None):
        config.layer_types = [module.config.layer_types[i] for i in kept]
    student = type(module)(config)
    student.load_state_dict(_renamed(module.state_dict(), _prefix(module, held[0]), kept))
    student = student.float()
    for frozen in (student.get_input_embeddings(), student.get_output_embeddings()):
        frozen.requires_grad_(False)
    return student.train()


def _prefix(module: nn.Module, layers: nn.ModuleList) -> str:
    return "".join(f"{name}." for name, child in module.named_modules() if child is layers)


def _renamed(weights: dict[str, torch.Tensor], prefix: str, kept: list[int]) -> dict[str, torch.Tensor]:
    """The weights with the kept layers numbered anew and the others left out."""
    out = {}
    for name, value in weights.items():
        if not name.startswith(prefix):
            out[name] = value
            continue
        number, _, rest = name.removeprefix(prefix).partition(".")
        if int(number) in kept:
            out[f"{prefix}{kept.index(int(number))}.{rest}"] = value
    return out
