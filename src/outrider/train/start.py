"""Where training starts: a head's layer as the target's last one, fed the best linear guess of what that one would see.

A narrower network takes those of the target's neurons that contribute most. For targets of Llama's kind (a list of layers
with q_proj, …, down_proj); others start from random weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.heads.config import HeadConfig, Kind
from outrider.heads.layers import AutoregressiveHead, Layer
from outrider.heads.target_parts import UNITS
from outrider.models.transformers_model import TransformersModel
from outrider.train.unroll import shifted

USUAL_SIZE = 64  # of attention heads
RIDGE = 1e-3  # of the mean square: keeps the fit sound where positions are few
_NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
_NETWORK = ("gate_proj", "up_proj", "down_proj")


def head_config(
    target: TransformersModel,
    kind: Kind,
    num_tokens: int,
    intermediate_size: int | None,
    blocks: int,
    window: int,
    layers: tuple[int, ...] = (),
) -> HeadConfig:
    """A head's shape for a target: its last layer's, where it has one of Llama's kind."""
    config = target.module.config.get_text_config()
    width = target.state_size
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    size = int((heads and getattr(config, "head_dim", None)) or width // (heads or max(1, width // USUAL_SIZE)))
    heads = heads or width // size  # of a target without attention
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", None)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    last = last_layer(target)
    return HeadConfig(
        kind=kind,
        target=target.name,
        width=width,
        vocab_size=target.vocab_size,
        num_tokens=num_tokens,
        intermediate_size=intermediate_size or (inner if kind == "autoregressive" else width),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=size,
        rope_theta=float(theta or 10000.0),
        norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        qkv_bias=last is not None and last.self_attn.q_proj.bias is not None,
        window=window,
        blocks=blocks,
        layers=layers,
    )


def last_layer(target: TransformersModel) -> Any:
    """The target's last layer, None if it is not of Llama's kind."""
    body = target.module.get_decoder()
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(body, "norm"):
        return None
    last = layers[-1]
    attention, network = getattr(last, "self_attn", None), getattr(last, "mlp", None)
    fits = all(hasattr(attention, name) for name in _NAMES.values())
    plain = not hasattr(attention, "q_norm") and hasattr(last, "post_attention_layernorm")
    return last if fits and plain and all(hasattr(network, name) for name in _NETWORK) else None


@torch.inference_mode()
def start_from_target(network: AutoregressiveHead, target: TransformersModel, tokens: Tensor) -> bool:
    """Copy the target's last layer and fit what feeds it, on some windows (int64 [n, L]). → whether that was possible"""
    last, config = last_layer(target), network.config
    if last is None or config.intermediate_size > int(target.module.config.get_text_config().intermediate_size):
        return False
    layer = network.layer
    for own, theirs in _NAMES.items():
        _copy(getattr(layer, own), getattr(last.self_attn, theirs))
    layer.attention_norm.get_parameter("weight").data.copy_(last.input_layernorm.weight)
    layer.network_norm.weight.data.copy_(last.post_attention_layernorm.weight)
    network.norm.weight.data.copy_(target.module.get_decoder().norm.weight)
    _copy_network(layer, last.mlp, _fit_mix(network, target, last, tokens))
    return True


def _copy_network(layer: Layer, theirs: Any, energy: Tensor) -> None:
    """Gate, up and down, of the neurons with the largest contributions. energy: each one's mean square before `down`."""
    down = weight_of(theirs.down_proj, len(energy)).to(energy.device)
    wide = layer.gate.out_features
    kept = (energy.sqrt() * down.norm(dim=0)).topk(wide).indices.sort().values
    for own, their in ((layer.gate, theirs.gate_proj), (layer.up, theirs.up_proj)):
        own.weight.data.copy_(weight_of(their, own.in_features)[kept])
    layer.down.weight.data.copy_(down[:, kept])


def _copy(own: nn.Linear, theirs: Any) -> None:
    own.weight.data.copy_(weight_of(theirs, own.in_features))
    if own.bias is not None and theirs.bias is not None:
        own.bias.data.copy_(theirs.bias)


def weight_of(layer: Any, width: int) -> Tensor:
    """The weight of a linear layer, packed or not, by its effect on unit vectors. → [out, width], float32"""
    dtype, device = layer.weight.dtype, "cpu" if layer.weight.is_meta else layer.weight.device
    offset = layer(torch.zeros(1, width, dtype=dtype, device=device)).float()
    units = torch.eye(width, dtype=dtype, device=device)
    return torch.cat([layer(part).float() - offset for part in units.chunk(-(-width // UNITS))]).T


def _fit_mix(network: AutoregressiveHead, target: TransformersModel, last: Any, tokens: Tensor) -> Tensor:
    """Least squares from the normed (token, states before) to the last layer's input. → the mean square of what each neuron
    of the last layer's network says, float64
    """
    config = network.config
    width, inputs = config.width, config.width + config.states_width
    gram = torch.zeros(inputs, inputs, dtype=torch.float64)
    cross = torch.zeros(inputs, width, dtype=torch.float64)
    embed = target.module.get_input_embeddings()
    squares: list[Tensor] = []
    hook = last.mlp.down_proj.register_forward_pre_hook(lambda _, given: squares.append(_mean_square(given[0])))
    try:
        for row in tokens:
            window = row.unsqueeze(0)
            out = target.module(input_ids=window.to(target.device), output_hidden_states=True, use_cache=False)
            wanted = out.hidden_states[-2][0]
            before = [out.hidden_states[layer][0] for layer in (-1, *config.layers)]
            parts = [embed(window.to(target.device))[0], *(shifted(states, 1) for states in before)]
            x = (
                torch.cat([F.rms_norm(part.float(), (width,), eps=network.config.norm_eps) for part in parts], dim=-1)
                .cpu()
                .double()
            )
            gram += x.T @ x
            cross += x.T @ wanted.cpu().double()
    finally:
        hook.remove()
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    network.mix.join.weight.data.copy_(torch.linalg.solve(gram, cross).T)
    return torch.stack(squares).mean(0)


def _mean_square(x: Tensor) -> Tensor:
    """Over all positions. [.., n] → [n]"""
    return x.double().flatten(0, -2).square().mean(0).cpu()
