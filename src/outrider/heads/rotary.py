"""Rotary positions of draft heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.config import HeadConfig
from outrider.kernels.models import Kernels


class Rotary(nn.Module):
    """Cosines and sines of rotary positions (Su et al. 2021), by a base alone or scaled for long contexts as the head's
    config says.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.size, self.theta = config.head_size, config.rope_theta
        self._angles: Any = None
        self.scaled: Frequencies | None = None
        if config.published is not None and config.published.rope.get("rope_type", "default") != "default":
            self.scaled = Frequencies(config, config.published.rope)

    def use(self, ours: Kernels) -> None:
        """Compute in float32 by kernels of ours from now on, as a quantized head does."""
        frequencies, _ = self._exact(torch.device("cpu"), torch.float32)
        self.register_buffer("frequencies", frequencies.clone(), persistent=False)
        self._angles = ours.ops.angles

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `rotate` takes. int64 [R, N] → [R, 1, N, size] twice"""
        if self._angles is not None and dtype is torch.float32:
            cos, sin = self._angles(positions, self.get_buffer("frequencies"), self._times)
            return cos.unsqueeze(1), sin.unsqueeze(1)
        exact = torch.promote_types(dtype, torch.float32)
        frequencies, times = self._exact(positions.device, exact)
        angles = (positions.to(exact).unsqueeze(-1) * frequencies).repeat(1, 1, 2).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if times != 1.0:
            cos, sin = cos * times, sin * times
        return cos.to(dtype), sin.to(dtype)

    @property
    def _times(self) -> float:
        return 1.0 if self.scaled is None else float(self.scaled.times)

    def _exact(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, float]:
        """Frequencies [size / 2], and what cosines and sines are multiplied with."""
        if self.scaled is not None:
            return self.scaled.values.to(dtype), self._times
        steps = torch.arange(0, self.size, 2, device=device, dtype=dtype)
        return self.theta ** (-steps / self.size), 1.0


def use_kernels(network: nn.Module, ours: Kernels) -> None:
    """In all of a head's rotary positions."""
    for part in network.modules():
        if isinstance(part, Rotary):
            part.use(ours)


class Frequencies(nn.Module):
    """Scaled frequencies by transformers' own rules, float32 [size / 2] whatever type the head is in. times: what cosines
    and sines are multiplied with.
    """

    values: Tensor

    def __init__(self, config: HeadConfig, rope: dict[str, Any]) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        about = LlamaConfig(
            hidden_size=config.width,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_size,
            max_position_embeddings=config.window,
            rope_parameters={"rope_theta": config.rope_theta, **rope},
        )
        with torch.device("cpu"):  # whatever the network is made on
            values, self.times = ROPE_INIT_FUNCTIONS[rope["rope_type"]](about, torch.device("cpu"))
        self.register_buffer("values", values, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Frequencies:
        exact = self.values
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.values = exact.to(self.values.device)  # positions in the thousands need more than 8 bits
        return self


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions (Su et al. 2021), halves paired as in Llama. [R, heads, N, size]"""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
