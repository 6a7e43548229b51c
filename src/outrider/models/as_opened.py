"""What an engine reads off a module once, when it is opened around it, and looks at again when a sequence is opened."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from outrider.errors import ParameterError
from outrider.models.cache.masks import attention_pattern
from outrider.models.limits import context_limit


@dataclass(frozen=True)
class AsOpened:
    """embeddings: the shape of the token table. windows: how far back layers see (`masks.AttentionPattern`). positions: how
    many there are.
    """

    dtype: torch.dtype
    device: torch.device
    attention: str
    embeddings: tuple[int, ...]
    windows: dict[str, int | None]
    positions: int | None

    @classmethod
    def of(cls, module: Any, name: str) -> AsOpened:
        """name: for the error, `ModelError`, of layers that can't be rolled back."""
        try:
            size = tuple(module.get_input_embeddings().weight.shape)
        except (NotImplementedError, AttributeError):  # it has none, or does not say
            size = ()
        config = decoder_config(module)
        windows, attention = attention_pattern(config, name).windows, module.config._attn_implementation
        return cls(module.dtype, module.device, attention, size, windows, context_limit(config))

    def check(self, module: Any, name: str) -> None:
        """Raise `ParameterError` unless the module is still like this."""
        refuse_training(module, name)
        now = AsOpened.of(module, name)
        if now == self:
            return
        what = next(field.name for field in fields(self) if getattr(now, field.name) != getattr(self, field.name))
        raise ParameterError(
            f"{name} was opened with {what} {getattr(self, what)} and has {getattr(now, what)} by now: open it anew, "
            "TransformersModel(module, tokenizer)"
        )


def decoder_config(module: Any) -> Any:
    """The configuration of what decodes: the text's part of a model that reads images, too."""
    return module.config if module.config.is_encoder_decoder else module.config.get_text_config()


def _differs_in_training(part: torch.nn.Module) -> bool:
    """Whether it drops something then, or normalises otherwise; a layer that somebody has put in need not be told `eval`."""
    if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
        return True
    shares = {"p": part.p} if isinstance(part, torch.nn.modules.dropout._DropoutNd) else vars(part)
    return any((name == "p" or "drop" in name) and isinstance(share, float) and share > 0 for name, share in shares.items())


def refuse_training(module: Any, name: str) -> None:
    """Raise `ParameterError` if its passes are those of a training."""
    if module.training or any(part.training and _differs_in_training(part) for part in module.modules()):
        raise ParameterError(f"{name} is in training mode, with dropout that no draft foresees: call .eval()")
