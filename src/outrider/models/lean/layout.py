"""Which models have lean passes, and what these read of one: weights as they lie in the module, and a table of angles.

The classes are transformers' own, of the model and of each part, since a structure does not tell what else the code does;
that the numbers are right is tried on the model itself (`captured_trial`), where half precision hides what is small.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    if not _is_known(model) or not all(_plain_tensor(weight, model) for weight in module.parameters()):
        return None
    body = module.model
    found = [layer for layer in map(_layer, body.layers) if layer is not None]
    if not found or len(found) < len(body.layers):
        return None
    first = body.layers[0].self_attn
    head = module.lm_head
    size = int(first.head_dim)
    kv_heads, heads = found[0].key[0].shape[0] // size, found[0].query[0].shape[0] // size
    if not _plain(head) or head.bias is not None or size not in SIZES or heads % kv_heads:
        return None
    assert model.max_length
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


def _is_known(model: TransformersModel) -> bool:
    """Whether nothing about it, but for the shapes of its weights, is other than these passes compute."""
    if model.quantized or model.dtype not in DTYPES or not _is_transformers_own(model.module):
        return False
    config = model.module.config
    angles = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windows = model.window is not None
    short = model.max_length is not None and 0 < model.max_length <= MOST_ANGLES
    return angles in STEADY_ANGLES and short and not windows and config.hidden_act == "silu"


def _is_transformers_own(module: nn.Module) -> bool:
    """Whether the model, and every part that is not torch's own, has a class of transformers' file for that model."""
    import transformers

    kind = type(module)
    if kind.__name__ not in CLASSES or kind is not getattr(transformers, kind.__name__):
        return False
    home = sys.modules[kind.__module__]
    torchs = (nn.Embedding, nn.Linear, nn.ModuleList, nn.SiLU)
    return all(type(part) in (*torchs, getattr(home, type(part).__name__, None)) for part in _parts(module))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """But for the activation, whose class depends on what else is installed; its name is looked at."""
    return (part for name, part in module.named_modules() if not name.endswith(".act_fn"))


def _plain_tensor(tensor: Tensor, model: TransformersModel) -> bool:
    """Whether its memory can be read as it is: others wrap what they hold, and have none."""
    like = (tensor.dtype, tensor.device) == (model.dtype, model.device)
    return type(tensor) in (Tensor, nn.Parameter) and like and tensor.is_contiguous()


def _plain(layer: Any) -> bool:
    return type(layer) is nn.Linear


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
