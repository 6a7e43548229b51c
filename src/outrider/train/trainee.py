"""What is trained, with the frozen parts of the target that it needs: a head, or a student.

`forward` gives the loss, and by depth the sums of alpha and of greedy matches over positions, for the held-out text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.layers import AutoregressiveHead, BlockwiseHeads
from outrider.heads.target_parts import output_rows
from outrider.models.transformers_model import TransformersModel
from outrider.train.losses import Loss, divergence
from outrider.train.unroll import blocks, chains

DECAY = 0.8  # the weight of a depth relative to the one before: later tokens count only if earlier ones are accepted


class Trainee(nn.Module):
    """rows: the target's output layer for the tokens that are drafted, in float32, not trained and not saved."""

    def __init__(self, target: TransformersModel, tokens: Tensor, loss: Loss) -> None:
        super().__init__()
        rows = output_rows(target.module, tokens.to(target.device), target.state_size)
        self.register_buffer("rows", rows.weight.float(), persistent=False)
        self.register_buffer("offset", None if rows.bias is None else rows.bias.float(), persistent=False)
        self.loss: Loss = loss

    def logits(self, states: Tensor) -> Tensor:
        """[.., W] → [.., T]"""
        return nn.functional.linear(states, self.get_buffer("rows"), self._buffers["offset"])

    def target_probs(self, states: Tensor, normalisers: Tensor) -> Tensor:
        """The target's probabilities of the tokens that are drafted; they sum to less than 1 by those that are not."""
        with torch.no_grad():
            return (self.logits(states.float()) - normalisers.unsqueeze(-1)).exp()

    def compare(self, probs: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss, and the counts that alpha and the greedy match are made of."""
        losses, alphas = divergence(probs, logits, self.loss)
        same = probs.argmax(-1) == logits.argmax(-1)
        same = same & (probs.amax(-1) >= 1.0 - probs.sum(-1))  # else a token that is not drafted may be the best
        counts = {"alpha": alphas.detach().sum(), "match": same.sum(), "positions": torch.tensor(alphas.numel())}
        return losses.mean(), counts


class HeadTrainee(Trainee):
    """A head. depth: drafted tokens of a chain that are trained on (autoregressive); a blockwise head has its blocks."""

    def __init__(
        self, network: AutoregressiveHead | BlockwiseHeads, target: TransformersModel, tokens: Tensor, loss: Loss, depth: int
    ) -> None:
        super().__init__(target, tokens, loss)
        self.network = network
        self.depth = depth if isinstance(network, AutoregressiveHead) else network.config.blocks
        self.register_buffer("embedding", embedding_table(target), persistent=False)

    def forward(self, tokens: Tensor, states: Tensor, normalisers: Tensor) -> dict[str, Any]:
        """Tokens int64 [B, L], states [B, L, W], normalisers [B, L]"""
        probs = self.target_probs(states, normalisers)
        embedded = self.get_buffer("embedding")[tokens].float()
        total, weights, counts = torch.zeros((), device=probs.device), 0.0, []
        autoregressive = isinstance(self.network, AutoregressiveHead)
        unroll: Any = chains if autoregressive else blocks
        for s, predicted in enumerate(unroll(self.network, embedded, states.float(), self.depth)):
            # A chain's law is of the token after its position; a block's stands s positions ahead of it.
            ours, theirs = (
                (predicted[:, s:], probs[:, s:]) if autoregressive else (predicted[:, : len(probs[0]) - s], probs[:, s:])
            )
            loss, count = self.compare(theirs, self.logits(ours))
            total, weights = total + DECAY**s * loss, weights + DECAY**s
            counts.append(count)
        return {"loss": total / weights, "counts": counts}


class StudentTrainee(Trainee):
    """A small model over the target's whole vocabulary."""

    def __init__(self, student: Any, target: TransformersModel, loss: Loss) -> None:
        super().__init__(target, torch.arange(target.vocab_size), loss)
        self.network = student

    def forward(self, tokens: Tensor, states: Tensor, normalisers: Tensor) -> dict[str, Any]:
        """As `HeadTrainee.forward`, one depth."""
        loss, count = self.compare(self.target_probs(states, normalisers), self.network(input_ids=tokens).logits)
        return {"loss": loss, "counts": [count]}


@torch.inference_mode()
def embedding_table(target: TransformersModel) -> Tensor:
    """The target's input embeddings, whatever layer they are in. → [V, W], the target's dtype"""
    embed = target.module.get_input_embeddings()
    ids = torch.arange(target.vocab_size, device=target.device)
    return torch.cat([embed(part) for part in ids.chunk(-(-target.vocab_size // 8192))]).clone()
