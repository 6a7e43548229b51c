"""What an engine reads off a module once, when it is opened around it, and looks at again when a sequence is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import ParameterError


@dataclass(frozen=True)
class AsOpened:
    """embeddings: the shape of the token table."""

    dtype: torch.dtype
    device: torch.device
    attention: str
    embeddings: tuple[int, ...]

    @classmethod
    def of(cls, module: Any) -> AsOpened:
        try:
            size = tuple(module.get_input_embeddings().weight.shape)
        except (NotImplementedError, AttributeError):  # it has none, or does not say
            size = ()
        return cls(module.dtype, module.device, module.config._attn_implementation, size)

    def check(self, module: Any, name: str) -> None:
        """Raise `ParameterError` unless the module is still like this."""
        refuse_training(module, name)
        now = AsOpened.of(module)
        if now == self:
            return
        what = next(
            field for field in ("dtype", "device", "attention", "embeddings") if getattr(now, field) != getattr(self, field)
        )
        raise ParameterError(
            f"{name} was opened with {what} {getattr(self, what)} and has {getattr(now, what)} by now: open it anew, "
            "TransformersModel(module, tokenizer)"
        )


def refuse_training(module: Any, name: str) -> None:
    """Raise `ParameterError` if its passes are those of a training."""
    if module.training:
        raise ParameterError(f"{name} is in training mode, with dropout that no draft foresees: call .eval()")
