"""The networks of published heads, in terms of `heads.layers`, so that they are quantized, recorded and captured like ours.

Each computes what its project's code does for a chain of drafted tokens (their trees are another matter: docs/design.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.heads.config import HeadConfig, Published
from outrider.heads.layers import Attend, HeadNetwork, Layer, Norm


class EagleHead(HeadNetwork):
    """EAGLE and EAGLE-2 (Li et al. 2024): one linear map joins token and state, and a layer whose output is the next state.

    Nothing is normed before attention (`input_norm` aside) or at the end: what the layer gives stands for the target's state
    after its final norm.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        published = _published(config)
        self.config = config
        self.join = nn.Linear(2 * config.width, config.width, bias=published.join_bias)
        self.layer = Layer(config, normed=published.input_norm)

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `AutoregressiveHead.forward`."""
        out: Tensor = self.layer(self.join(torch.cat([embeddings, states], dim=-1)), positions, attend)
        return out


class Eagle3Head(HeadNetwork):
    """EAGLE-3 (Li et al. 2025): the target's states after several layers become one vector; attention reads it beside the
    token, each normed; what it predicts is read like that vector. The final norm belongs to the output layer, what goes on
    is not normed, but for heads of the later kind (`norm_output`).
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        published = _published(config)
        self.config = config
        read = published.reads * published.target_width
        self.join_norm = Norm(read, config.norm_eps) if published.input_norm else nn.Identity()
        parts = published.reads if published.part_norms else 0
        self.part_norms = nn.ModuleList(Norm(published.target_width, config.norm_eps) for _ in range(parts))
        self.join = nn.Linear(read, config.width, bias=False)
        self.token_norm = Norm(config.width, config.norm_eps)
        self.state_norm = Norm(config.width, config.norm_eps)
        self.layer = Layer(config, reads=2 * config.width, normed=False)
        self.norm = Norm(config.width, config.norm_eps) if published.norm_output else nn.Identity()
        self._residual_normed = published.norm_before_residual
        self._skipped = published.target_width

    def condense(self, states: Tensor) -> Tensor:
        """See `HeadNetwork`: the last state is not read."""
        read = states[..., self._skipped :]
        if len(self.part_norms):
            parts = torch.split(read, self._skipped, dim=-1)
            read = torch.cat([norm(part) for norm, part in zip(self.part_norms, parts, strict=True)], dim=-1)
        out: Tensor = self.join(self.join_norm(read))
        return out

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `AutoregressiveHead.forward`."""
        normed = self.state_norm(states)
        attended = torch.cat([self.token_norm(embeddings), normed], dim=-1)
        out: Tensor = self.norm(self.layer(normed if self._residual_normed else states, positions, attend, attended))
        return out


class MedusaHeads(HeadNetwork):
    """Medusa (Cai et al. 2024): residual blocks on the target's last state, for each of the positions after the newest
    token's, which they don't see.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        depth = _published(config).depth
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(depth)) for _ in range(config.blocks)
        )
        self.activation = nn.SiLU()

    def forward(self, embeddings: Tensor, states: Tensor, count: int | None = None) -> Tensor:
        """See `BlockwiseHeads.forward`."""
        del embeddings
        out = []
        for block in list(self.blocks)[:count]:
            x = states
            for linear in block:  # type: ignore[attr-defined]
                x = x + self.activation(linear(x))
            out.append(x)
        return torch.stack(out, dim=-2)


class BlockRows(nn.Module):
    """An output layer for each of the positions. [.., count, W] → [.., count, T], count at most theirs"""

    def __init__(self, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, states: Tensor) -> Tensor:
        heads = list(self.heads)[: states.shape[-2]]
        return torch.stack([head(states[..., i, :]) for i, head in enumerate(heads)], dim=-2)


class NormedRows(nn.Module):
    """A norm and an output layer. [.., W] → [.., T]"""

    def __init__(self, norm: Tensor, eps: float, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = Norm(len(norm), eps), head
        self.norm.weight = nn.Parameter(norm, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(states))
        return out


def make_published(config: HeadConfig) -> HeadNetwork:
    """The network of a published head of that shape, without weights: they are assigned."""
    with torch.device("meta"):  # fresh ones of a large head take seconds and a gigabyte
        return {"EAGLE": EagleHead, "EAGLE-3": Eagle3Head, "Medusa": MedusaHeads}[_published(config).layout](config)


def _published(config: HeadConfig) -> Published:
    assert config.published is not None
    return config.published
