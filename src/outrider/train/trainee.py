"""What is trained, with the frozen parts of the target that it needs: a head, or a student (`students`).

`forward` gives the loss, and by depth the sums of alpha and of greedy matches over positions, for the held-out text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.heads.layers import AutoregressiveHead, BlockwiseHeads
from outrider.heads.target_parts import output_rows
from outrider.models.transformers_model import TransformersModel
from outrider.train.fused import Rows, Sums, TargetLaws, summed
from outrider.train.losses import Loss
from outrider.train.unroll import blocks, chains, shifted

DECAY = 0.8  # the weight of a depth relative to the one before: later tokens count only if earlier ones are accepted


class Trainee(nn.Module):
    """rows: the target's output layer for the tokens that are drafted, in float32, not trained and not saved."""

    def __init__(self, target: TransformersModel, tokens: Tensor, loss: Loss) -> None:
        super().__init__()
        rows = output_rows(target, tokens.to(target.device))
        self.register_buffer("target_rows", rows.weight.float(), persistent=False)  # which move with the module
        self.register_buffer("target_offset", None if rows.bias is None else rows.bias.float(), persistent=False)
        self.loss: Loss = loss

    def rows(self) -> Rows:
        """The target's."""
        return Rows(self.get_buffer("target_rows"), self._buffers["target_offset"])

    def laws(self, states: Tensor, normalisers: Tensor) -> TargetLaws:
        """What the target says. States whose first W are the last ones [.., ≥ W], [..]"""
        rows = self.rows()
        last = states[..., : rows.weight.shape[1]].float()
        return TargetLaws(last.flatten(0, -2), normalisers.flatten(), rows)


class HeadTrainee(Trainee):
    """A head. depth: drafted tokens of a chain that are trained on (autoregressive); a blockwise head has its blocks."""

    def __init__(
        self, network: AutoregressiveHead | BlockwiseHeads, target: TransformersModel, tokens: Tensor, loss: Loss, depth: int
    ) -> None:
        super().__init__(target, tokens, loss)
        self.network = network
        self.depth = depth if isinstance(network, AutoregressiveHead) else network.config.blocks
        self.register_buffer("embedding", embedding_table(target), persistent=False)

    def forward(self, tokens: Tensor, states: Tensor, normalisers: Tensor, drafted: Tensor) -> dict[str, Any]:
        """Tokens int64 [B, L], states [B, L, states_width], normalisers [B, L], drafted bool [B, L] (`states.Shard`)

        Prompts are trained on like other text, but nobody drafts them: they are not counted where alpha is measured.
        """
        embedded = self.get_buffer("embedding")[tokens].float()
        if isinstance(self.network, AutoregressiveHead):
            predicted = chains(self.network, embedded, states.float(), self.depth)
        else:  # a block's law stands s positions ahead of it
            predicted = [shifted(one, s) for s, one in enumerate(blocks(self.network, embedded, states.float(), self.depth))]
        begins = torch.ones_like(drafted) if self.training else drafted  # where a chain may
        counted = torch.stack([F.pad(begins, (s, 0))[:, : tokens.shape[1]] & begins for s in range(self.depth)])
        positions = counted.sum((1, 2))
        decays = torch.tensor([DECAY**s for s in range(self.depth)], device=tokens.device)
        rows = counted.flatten(1) * (decays / decays.sum() / positions.clamp(min=1)).unsqueeze(-1)
        every = torch.stack(predicted).flatten(1, 2)
        sums = summed(every, self.rows(), self.laws(states, normalisers), rows, self.loss)
        return {"loss": sums.loss, "counts": counts(sums, positions)}


def counts(sums: Sums, positions: Tensor) -> list[dict[str, Tensor]]:
    """What alpha and the greedy match are made of, by depth."""
    every = zip(sums.alpha, sums.match, positions, strict=True)
    return [{"alpha": alpha, "match": match, "positions": count} for alpha, match, count in every]


@torch.inference_mode()
def embedding_table(target: TransformersModel) -> Tensor:
    """The target's input embeddings, whatever layer they are in. → [V, W], the target's dtype"""
    ids = torch.arange(target.vocab_size, device=target.device)
    return torch.cat([target.embed(part) for part in ids.chunk(-(-target.vocab_size // 8192))]).clone()
