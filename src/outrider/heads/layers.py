"""The parts of draft heads: what mixes a state with a token, one layer of Llama's kind, and heads a position.

The layer's architecture is its own whatever the target's: it needs the states' width only. Attention over earlier positions
is the caller's: over a cache when drafting (`drafters.head`), over an unrolled text when training (`train.unroll`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.heads.config import HeadConfig
from outrider.heads.rotary import Rotary, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [R, heads, N, size], keys and values [R, kv heads, N, size], keys turned → mixed values [R, heads, N, size]."""


class Norm(nn.Module):
    """Root-mean-square norm, in float32 or better."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class HeadNetwork(nn.Module):
    """What all heads are."""

    config: HeadConfig

    def condense(self, states: Tensor) -> Tensor:
        """What the network reads of a target's states, the last one first. [.., (1 + layers) · target's width] →
        [.., states_width]
        """
        return states


class Mix(nn.Module):
    """A target's states and the embedding of the token after them → one vector. Each is normed: their scales differ by far.

    The last state may come without those of further layers: they count as zeros, which the norm leaves zeros.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.width = config.width
        self.token_norm = Norm(config.width, config.norm_eps)
        self.state_norm = Norm(config.width, config.norm_eps)
        self.layer_norms = nn.ModuleList(Norm(config.width, config.norm_eps) for _ in config.layers)
        self.join = nn.Linear(config.width + config.states_width, config.width, bias=False)

    def forward(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """[.., width], [.., width or states_width] → [.., width]"""
        widths = (self.width, self.join.in_features - self.width)
        if states.shape[-1] not in widths:
            raise ParameterError(f"states must be {widths[0]} or {widths[1]} wide, got {states.shape[-1]}")
        norms = [self.state_norm, *self.layer_norms]
        every = torch.split(states, embeddings.shape[-1], dim=-1)
        parts = [self.token_norm(embeddings), *(norm(one) for norm, one in zip(norms, every, strict=False))]
        joined = torch.cat(parts, dim=-1)
        missing = self.join.in_features - joined.shape[-1]
        out: Tensor = self.join(F.pad(joined, (0, missing)) if missing else joined)
        return out


class Layer(nn.Module):
    """Attention and a gated network, each normed before and added to its input.

    reads: width of what attention reads, if that is not the layer's input (`forward`'s `attended`). normed: whether it is
    normed here.
    """

    def __init__(self, config: HeadConfig, reads: int | None = None, normed: bool = True) -> None:
        super().__init__()
        self.config = config
        wide, narrow = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        reads = config.width if reads is None else reads
        self.attention_norm = Norm(reads, config.norm_eps) if normed else nn.Identity()
        self.query = nn.Linear(reads, wide, bias=config.qkv_bias)
        self.key = nn.Linear(reads, narrow, bias=config.qkv_bias)
        self.value = nn.Linear(reads, narrow, bias=config.qkv_bias)
        self.out = nn.Linear(wide, config.width, bias=config.published is not None and config.published.out_bias)
        self.network_norm = Norm(config.width, config.norm_eps)
        self.gate = nn.Linear(config.width, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.width, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.width, bias=False)
        self.activation = nn.SiLU()  # a module, so that a quantized head can have another (`models.kernels.rows`)
        self.rotary = Rotary(config)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, attended: Tensor | None = None) -> Tensor:
        """X [R, N, width], positions int64 [R, N] → [R, N, width]. attended: what attention reads, [R, N, reads]; x if not
        given.
        """
        normed = self.attention_norm(x if attended is None else attended)
        turn = self.rotary(positions, x.dtype)
        queries = rotate(_split(self.query(normed), self.config.num_heads), turn)
        keys = rotate(_split(self.key(normed), self.config.num_kv_heads), turn)
        mixed = attend(queries, keys, _split(self.value(normed), self.config.num_kv_heads))
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.network_norm(x)
        out: Tensor = x + self.down(self.activation(self.gate(normed)) * self.up(normed))
        return out


class AutoregressiveHead(HeadNetwork):
    """One layer on (state, next token): its output stands for the target's state at that token (EAGLE, Li et al. 2024).

    Chen et al. (Section 4) name the idea, "activations of the target as input".
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.mix = Mix(config)
        self.layer = Layer(config)
        self.norm = Norm(config.width, config.norm_eps)

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The token at each position [R, N, width] and the target's states before it [R, N, states_width], or the state that
        was predicted [R, N, width]; positions int64 [R, N] → predicted states [R, N, width]
        """
        out: Tensor = self.norm(self.layer(self.mix(embeddings, states), positions, attend))
        return out


class BlockwiseHeads(HeadNetwork):
    """A head for each of the next positions, none of which sees what the others say (Stern et al. 2018; Medusa, 2024).

    They read the target's last state and the newest token, which is certain but not yet scored.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.mixes = nn.ModuleList(Mix(config) for _ in range(config.blocks))
        self.ups = nn.ModuleList(nn.Linear(config.width, config.intermediate_size) for _ in range(config.blocks))
        self.downs = nn.ModuleList(nn.Linear(config.intermediate_size, config.width) for _ in range(config.blocks))
        self.norms = nn.ModuleList(Norm(config.width, config.norm_eps) for _ in range(config.blocks))

    def forward(self, embeddings: Tensor, states: Tensor, count: int | None = None) -> Tensor:
        """[.., width] twice → [.., count, width], the states that stand for the next positions; count ≤ blocks."""
        out = []
        for mix, up, down, norm in list(zip(self.mixes, self.ups, self.downs, self.norms, strict=True))[:count]:
            x = mix(embeddings, states)
            out.append(norm(x + down(F.silu(up(x)))))
        return torch.stack(out, dim=-2)


def make_network(config: HeadConfig) -> AutoregressiveHead | BlockwiseHeads:
    """The network of one of Outrider's own of that shape, with fresh weights."""
    return AutoregressiveHead(config) if config.kind == "autoregressive" else BlockwiseHeads(config)


def load_weights(network: nn.Module, config: HeadConfig, weights: dict[str, Tensor]) -> None:
    """Raises `ModelError` if they are not of a network of that shape."""
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(f"draft head for {config.target} can't be used: {in_one_line(error, 200)}") from error


def _split(x: Tensor, heads: int) -> Tensor:
    """[R, N, heads · size] → [R, heads, N, size]"""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)
