"""A student of the target's width with few layers: "wide and shallow", since its time goes by depth (Chen, Table 2).

It is the target's first layers, its embeddings, and a linear map from their state to the target's last one, which the
target's head reads, as it does for draft heads. The map starts by least squares, so that a student is right in more than a
quarter of its tokens before it is trained; layers spread evenly over the target's give next to nothing without it
(EXPERIMENTS.md, "A student of few layers"). When it is saved, the map becomes part of a head of its own, and the student is
an ordinary transformers model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.models.transformers_model import TransformersModel
from outrider.models.weights.packed_linear import check_readable
from outrider.train.student_module import student_module

RIDGE = 1e-3  # of the mean square: keeps the fit sound where positions are few


class ShallowStudent(nn.Module):
    """module: of the target's class with its first layers. Trained: the layers, the final norm, and the map."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        width = int(module.config.get_text_config().hidden_size)
        self.module = module
        self.map = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.map.weight)

    def own_states(self, tokens: Tensor) -> Tensor:
        """After its final norm. [B, L] → [B, L, W]"""
        out: Tensor = self.module.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """What the target's last states would be. [B, L] → [B, L, W]"""
        out: Tensor = self.map(self.own_states(tokens))
        return out

    @torch.no_grad()
    def fit(self, windows: Iterable[tuple[Tensor, Tensor]]) -> None:
        """The map by least squares, on tokens [L] and the target's last states [L, ≥ W] of some windows; without dropout."""
        training, width = self.training, self.map.in_features
        self.eval()
        gram, cross = (torch.zeros(width, width, dtype=torch.float64) for _ in range(2))
        for tokens, states in windows:
            own = self.own_states(tokens.to(self.map.weight.device).unsqueeze(0))[0].cpu().double()
            gram += own.T @ own
            cross += own.T @ states[:, :width].cpu().double()
        gram += RIDGE * gram.diagonal().mean() * torch.eye(width, dtype=torch.float64)
        self.map.weight.copy_(torch.linalg.solve(gram, cross).T)
        self.train(training)

    @torch.no_grad()
    def whole(self) -> Any:
        """The module with the map in a head of its own, as it is saved and drafts."""
        head = self.module.get_output_embeddings()
        own = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
        own.weight.copy_(head.weight.float() @ self.map.weight)
        if head.bias is not None:
            own.bias.copy_(head.bias)
        for config in (self.module.config, self.module.config.get_text_config()):
            config.tie_word_embeddings = False
        self.module.set_output_embeddings(own)
        return self.module


def make_shallow(target: TransformersModel, layers: int) -> ShallowStudent:
    """A student with the target's first `layers` layers, in float32, its map still to be fitted; embeddings frozen.

    Raises as `check_shallow` does.
    """
    config, prefix = check_shallow(target, layers)
    module = target.module
    weights = _first(module.state_dict(), prefix, layers)
    student = student_module(module, config, weights, f"{target.name} can't be made a student of")
    return ShallowStudent(student).train()


def check_shallow(target: TransformersModel, layers: int) -> tuple[Any, str]:
    """The student's configuration, and what the names of the target's layers begin with.

    The target must have been loaded with `pack=False`. Raises `ParameterError` or `ModelError` where there can be none.
    """
    module = target.module
    check_readable(module, "a student's target")
    total = int(module.config.get_text_config().num_hidden_layers)
    if not 1 <= layers < total:
        raise ParameterError(f"layers must be in 1 … {total - 1}, got {layers}")
    held = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child) == total]
    if len(held) != 1:
        raise ModelError(f"{target.name} can't be made a student of: its layers are not one list")
    head, width = module.get_output_embeddings(), int(module.config.get_text_config().hidden_size)
    if type(head) is not nn.Linear or head.in_features != width:
        raise ModelError(f"{target.name} can't be made a student of: its head is no linear layer on its states")
    return _shallow(module.config, layers, target.name), _prefix(module, held[0])


def _shallow(whole: Any, layers: int, name: str) -> Any:
    """The configuration with so many layers; what it lists by layer is cut to them."""
    config = copy.deepcopy(whole)
    text = config.get_text_config()
    total = int(text.num_hidden_layers)
    text.num_hidden_layers = layers
    for key, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == total and not key.endswith("_token_id"):
            setattr(text, key, value[:layers])
    try:  # as it will be read again: what can't be saved or loaded is said before anything is trained
        type(config).from_dict(config.to_dict())
    except Exception as error:
        reason = in_one_line(error)
        raise ModelError(
            f"{name} can't be made a student of: with {layers} layers its configuration is refused: {reason}"
        ) from error
    return config


def _prefix(module: nn.Module, layers: nn.ModuleList) -> str:
    return "".join(f"{name}." for name, child in module.named_modules() if child is layers)


def _first(weights: dict[str, torch.Tensor], prefix: str, layers: int) -> dict[str, torch.Tensor]:
    """The weights without those of further layers."""

    def wanted(name: str) -> bool:
        return not name.startswith(prefix) or int(name.removeprefix(prefix).partition(".")[0]) < layers

    return {name: value for name, value in weights.items() if wanted(name)}
