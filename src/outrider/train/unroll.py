"""A head's own continuations at every position of a text at once.

In drafting, the first token comes from the target's states, the second from the state that the head predicted for the
first, and so on, with keys and values left by those before. Trained on the target's states alone a head is bad at what
follows; so training runs the same chains, from every position in parallel ("training-time test", EAGLE-3, 2025).

Chain s at position j began at j - s: it sees the keys of depth 0 up to j - s, and one key of each depth k = 1 … s, at
j - s + k.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.heads.layers import AutoregressiveHead, BlockwiseHeads


def shifted(x: Tensor, by: int) -> Tensor:
    """What stood `by` positions before, zeros at the beginning. [.., L, W]"""
    return x if by == 0 else F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def chains(network: AutoregressiveHead, embeddings: Tensor, states: Tensor, depth: int) -> list[Tensor]:
    """The states that the head predicts, the s-th from position s. [B, L, W], [B, L, states_width] → `depth` times [B, L, W]

    After the first token a chain knows the state that it predicted, and none of the target's further layers.
    """
    positions = torch.arange(embeddings.shape[1], device=embeddings.device).expand(embeddings.shape[:2])
    attention = _Attention(network)
    before, out = shifted(states, 1), []
    for _ in range(depth):
        predicted = network(embeddings, before, positions, attention)
        out.append(predicted)
        before = shifted(predicted, 1)
    return out


def blocks(network: BlockwiseHeads, embeddings: Tensor, states: Tensor, depth: int) -> list[Tensor]:
    """The same for independent heads: the s-th stands for the state s positions on. `depth` times [B, L, W]"""
    return list(network(embeddings, shifted(states, 1), depth).unbind(-2))


class _Attention:
    """Attention for one depth after the other."""

    def __init__(self, network: AutoregressiveHead) -> None:
        self._config = network.config
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        groups = self._config.num_heads // self._config.num_kv_heads
        self._keys.append(keys.repeat_interleave(groups, 1))
        self._values.append(values.repeat_interleave(groups, 1))
        depth = len(self._keys) - 1
        at = torch.arange(queries.shape[2], device=queries.device)
        visible = (at <= at[:, None] - depth) & (at > at[:, None] - self._config.window)
        scores = [(queries @ self._keys[0].transpose(-1, -2)).masked_fill(~visible, -torch.inf)]
        for k in range(1, depth + 1):
            scores.append((queries * shifted(self._keys[k], depth - k)).sum(-1, keepdim=True))
        weights = (torch.cat(scores, dim=-1) / queries.shape[-1] ** 0.5).softmax(-1)
        if depth == 0:
            whole: Tensor = weights @ self._values[0]
            return whole
        length = queries.shape[2]
        # Before position `depth` no chain is complete; its weights are of its own keys alone, and nobody reads it.
        out: Tensor = weights[..., :length] @ self._values[0]
        for k in range(1, depth + 1):
            out = out + weights[..., length + k - 1 : length + k] * shifted(self._values[k], depth - k)
        return out
