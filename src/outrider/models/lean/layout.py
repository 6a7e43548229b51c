"""Which models have lean passes, and what these read of one: weights as they lie in the module, and a table of angles.

Named by class, since a structure does not tell what else the code does; that the numbers are right is tried on the model
itself (`captured_trial`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel

CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
STEADY_ANGLES = ("default", "linear", "llama3")  # that do not depend on the length of the text
MOST_ANGLES = 1 << 18  # positions in the table
SIZES = (32, 64, 128)  # of a head
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Projection = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Layer:
    """Norms [W]; weights as in the module, [out, in], and biases or None."""

    before: Tensor
    query: Projection
    key: Projection
    value: Projection
    out: Tensor
    between: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def biased(self) -> bool:
        """Whether what attention reads has biases."""
        return self.query[1] is not None


@dataclass(frozen=True)
class Layout:
    """table [V, W], head [T, W]; cos and sin [P, size / 2], of positions 0 … P - 1."""

    table: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    heads: int
    kv_heads: int
    size: int
    scale: float

    @property
    def width(self) -> int:
        """Of the states."""
        return self.table.shape[1]


def layout_of(model: TransformersModel) -> Layout | None:
    """None for a model that has no lean passes."""
    module = model.module
    config = module.config
    angles = getattr(config, "rope_parameters", None) or {}
    if type(module).__name__ not in CLASSES or model.rounded or model.dtype not in DTYPES:
        return None
    if any(window is not None for window in model._pattern.windows.values()) or config.hidden_act != "silu":
        return None
    if angles.get("rope_type", "default") not in STEADY_ANGLES or not model.max_length or model.max_length > MOST_ANGLES:
        return None
    body, found = module.model, []
    for part in body.layers:
        layer = _layer(part)
        if layer is None:
            return None
        found.append(layer)
    first = body.layers[0].self_attn
    head = module.lm_head
    size = int(first.head_dim)
    kv_heads, heads = found[0].key[0].shape[0] // size, found[0].query[0].shape[0] // size
    if not _plain(head) or head.bias is not None or size not in SIZES or heads % kv_heads:
        return None
    cos, sin = _angles(body.rotary_emb, model.max_length, model.dtype, model.device)
    return Layout(
        table=body.embed_tokens.weight,
        layers=tuple(found),
        norm=body.norm.weight,
        head=head.weight,
        cos=cos[:, : size // 2].contiguous(),
        sin=sin[:, : size // 2].contiguous(),
        eps=float(body.norm.variance_epsilon),
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        scale=float(first.scaling),
    )


def _plain(layer: Any) -> bool:
    return type(layer) is nn.Linear and layer.weight.is_contiguous()


def _layer(part: Any) -> Layer | None:
    attention, network = part.self_attn, part.mlp
    first = (attention.q_proj, attention.k_proj, attention.v_proj)
    rest = (attention.o_proj, network.gate_proj, network.up_proj, network.down_proj)
    if not all(map(_plain, (*first, *rest))) or any(layer.bias is not None for layer in rest):
        return None
    if len({layer.bias is None for layer in first}) > 1:
        return None
    query, key, value = ((layer.weight, layer.bias) for layer in first)
    return Layer(
        part.input_layernorm.weight, query, key, value, attention.o_proj.weight, part.post_attention_layernorm.weight,
        network.gate_proj.weight, network.up_proj.weight, network.down_proj.weight,
    )  # fmt: skip


@torch.inference_mode()
def _angles(rotary: Any, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """As the model computes them. → [P, size] each"""
    at = torch.arange(positions, device=device).unsqueeze(0)
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), at)
    return cos[0], sin[0]
