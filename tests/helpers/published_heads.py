"""Checkpoints of draft heads as other projects publish them, with random weights, and what those projects compute with them.

The references are put together from transformers' own Llama layer, whose weights have the checkpoints' names: nothing of
`outrider.heads` is in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from outrider.heads.engine import HeadModel
from outrider.heads.opening import open_head
from outrider.models.cache.slot_cache import cache_name
from outrider.models.transformers_model import TransformersModel
from tests.helpers.tiny_models import VOCABULARY, module

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


@dataclass
class Checkpoint:
    """config: of `config.json`. weights: by their published names. layer, parts: what they are the weights of."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    layer: Any = None
    parts: dict[str, nn.Module] = field(default_factory=dict)

    def write(self, folder: Path, weights: str = "model.safetensors", prefix: str = "") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        named = {prefix + name: value.contiguous().clone() for name, value in self.weights.items()}
        if weights.endswith(".safetensors"):
            save_file(named, folder / weights)
        else:
            torch.save(named, folder / weights)
        return folder


def _drawn(module: nn.Module, std: float = 0.2) -> Any:
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    return module.eval().requires_grad_(False)


def _layer(shape: dict[str, Any], rope: dict[str, Any], reads: int, bias: bool) -> Any:
    config = LlamaConfig(**shape, rope_parameters=rope, attention_bias=bias, attn_implementation="eager")
    layer: Any = LlamaDecoderLayer(config, 0)
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(reads, getattr(attention, name).out_features, bias=bias))
    attention.o_proj = nn.Linear(attention.o_proj.in_features, attention.o_proj.out_features, bias=bias)
    layer.rotary = LlamaRotaryEmbedding(config)
    return layer


def eagle(vocabulary: int, bias: bool = True, rope: dict[str, Any] | None = None, **more: Any) -> Checkpoint:
    """EAGLE and EAGLE-2: `fc` joins token and state, and the layer has no norm before attention."""
    torch.manual_seed(5)
    rope = rope or {"rope_type": "default", "rope_theta": 10000.0}
    layer = _layer(SHAPE, rope, 32, bias=False)
    layer.input_layernorm = nn.Identity()
    parts = {"fc": _drawn(nn.Linear(64, 32, bias=bias))}
    _drawn(layer)
    weights = {f"layers.0.{name}": value for name, value in layer.state_dict().items()}
    weights |= {f"fc.{name}": value for name, value in parts["fc"].state_dict().items()}
    config = {**SHAPE, "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, **more}
    return Checkpoint(config, weights, layer, parts)


def eagle3(
    vocabulary: int,
    tokens: list[int] | None = None,
    bias: bool = False,
    residual_normed: bool = False,
    norms: str = "",
    **more: Any,
) -> Checkpoint:
    """EAGLE-3: `fc` makes one vector of three layers' states, `d2t` says what the head's own tokens are.

    norms: of these states, input_norm (all at once) or fc_norm (each).
    """
    torch.manual_seed(7)
    layer = _layer(SHAPE, {"rope_type": "default", "rope_theta": 10000.0}, 64, bias)
    count = vocabulary if tokens is None else len(tokens)
    parts: dict[str, Any] = {
        "fc": nn.Linear(96, 32, bias=False),
        "norm": LlamaRMSNorm(32, eps=1e-5),
        "lm_head": nn.Linear(32, count, bias=False),
    }
    if norms == "input_norm":
        parts[norms] = LlamaRMSNorm(96, eps=1e-5)
    elif norms == "fc_norm":
        parts[norms] = nn.ModuleList(LlamaRMSNorm(32, eps=1e-5) for _ in range(3))
    layer.hidden_norm = LlamaRMSNorm(32, eps=1e-5)
    for part in (layer, *parts.values()):
        _drawn(part)
    layer.residual_normed = residual_normed
    weights = {f"midlayer.{name}": value for name, value in layer.state_dict().items()}
    for name, part in parts.items():
        weights |= {f"{name}.{inner}": value for inner, value in part.state_dict().items()}
    if tokens is not None:
        weights["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
        weights["t2d"] = torch.tensor([token in tokens for token in range(vocabulary)])
    config = {
        **SHAPE,
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": vocabulary,
        "draft_vocab_size": count,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},  # from 0: after the first, second and third layer
        **more,
    }
    return Checkpoint(config, weights, layer, parts)


def medusa(vocabulary: int, blocks: int = 3, depth: int = 1) -> Checkpoint:
    """Medusa: residual blocks and an output layer for each position."""
    torch.manual_seed(9)
    heads = nn.ModuleList()
    for _ in range(blocks):
        linear = [nn.ModuleDict({"linear": nn.Linear(32, 32)}) for _ in range(depth)]
        heads.append(nn.ModuleList([*linear, nn.Linear(32, vocabulary, bias=False)]))
    _drawn(heads)
    config = {"medusa_num_heads": blocks, "medusa_num_layers": depth, "base_model_name_or_path": "lmsys/tiny"}
    return Checkpoint(config, heads.state_dict(), heads)


CHECKPOINTS: dict[str, tuple[Callable[[int], Checkpoint], str]] = {
    "EAGLE": (eagle, "pytorch_model.bin"),
    "EAGLE-3": (lambda vocabulary: eagle3(vocabulary, list(range(0, vocabulary, 2))), "model.safetensors"),
    "Medusa": (medusa, "medusa_lm_head.pt"),
}
"""One of each, by the number of the target's tokens, and the file that its weights are in."""


class Chain:
    """What their code computes: pairs (token t + 1, state t) from t = 0 on in one pass, then one drafted token a pass."""

    def __init__(self, checkpoint: Checkpoint, embed: nn.Module) -> None:
        self.layer, self.parts, self.embed = checkpoint.layer, checkpoint.parts, embed
        self.cache = DynamicCache()
        self.seen = 0

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Tokens int64 [1, N] and what stands before each, [1, N, ·] → what is predicted at each, [1, N, 32]"""
        positions = torch.arange(self.seen, self.seen + tokens.shape[1]).unsqueeze(0)
        self.seen += tokens.shape[1]
        embedded = self.embed(tokens)
        if "norm" not in self.parts:  # EAGLE
            attended = residual = self.parts["fc"](torch.cat([embedded, states], dim=-1))
        else:
            if states.shape[-1] != embedded.shape[-1]:
                if "input_norm" in self.parts:
                    states = self.parts["input_norm"](states)
                elif "fc_norm" in self.parts:
                    norms: Any = self.parts["fc_norm"]
                    parts = torch.split(states, 32, dim=-1)
                    states = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
                states = self.parts["fc"](states)
            normed = self.layer.hidden_norm(states)
            attended = torch.cat([self.layer.input_layernorm(embedded), normed], dim=-1)
            residual = normed if self.layer.residual_normed else states
        new, total = tokens.shape[1], self.seen
        mask = torch.full((new, total), float("-inf"), dtype=torch.float64).triu(total - new + 1)[None, None]
        turn = self.layer.rotary(residual, positions)
        mixed, _ = self.layer.self_attn(
            attended, position_embeddings=turn, attention_mask=mask, **{cache_name(()): self.cache}
        )
        x = residual + mixed
        out: Tensor = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return out


TOKENS = [3, 4, 7, 10, 11, 20, 33, 34, 35, 60]
TEXT = [5, 9, 33, 20, 7, 11, 4, 60, 3]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DRAFTED = [33, 20, 35]


@cache
def deep_target(vocabulary: int = VOCABULARY) -> TransformersModel:
    return TransformersModel(module("Llama", 8, vocab_size=vocabulary, num_hidden_layers=6), name="deep")


def laws_of(target: TransformersModel, folder: Path) -> tuple[HeadModel, Tensor]:
    """Logits of a head's own tokens: along the text from its second token on, then after each of `DRAFTED`."""
    head = open_head(target, folder)
    base = target.open()
    target.score([base], torch.tensor([TEXT[:-1]]), [len(TEXT) - 1], "none")
    row = head.open_on(base)
    along = head.score([row], torch.tensor([TEXT]), [len(TEXT)])
    assert along is not None
    out = [along[0, 1:]]
    for token in DRAFTED:
        after = head.score([row], torch.tensor([[token]]), [1], "last")
        assert after is not None
        out.append(after[0])
    return head, torch.cat(out)
