"""The losses of a head's chains, and their gradient, a few rows of logits at a time.

The laws of all positions and depths over a vocabulary of some 16,000 tokens are hundreds of megabytes in every array, and
each operation on them runs at the memory's speed. The target's head is not trained, so what training needs from a row of
logits is its share of the loss and one gradient of the head's width. Both are computed here while the row is in the
processor's cache; nothing as wide as the vocabulary is kept. The losses are those of `losses`; a test holds value and
gradient to the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.train.losses import Loss

AT_ONCE = 1 << 20  # logits of a part: 4 MB in float32


@dataclass(frozen=True)
class Rows:
    """Those of an output layer for the tokens that are drafted, not trained. weight: [T, W]. offset: [T], None for 0."""

    weight: Tensor
    offset: Tensor | None

    def logits(self, states: Tensor) -> Tensor:
        """[.., W] → [.., T]"""
        return torch.nn.functional.linear(states, self.weight, self.offset)


@dataclass(frozen=True)
class TargetLaws:
    """What the target says at some positions: its states [N, W] and log normalisers [N], of which its rows make
    probabilities.
    """

    states: Tensor
    normalisers: Tensor
    rows: Rows

    def probs(self, part: slice) -> Tensor:
        """They sum to less than 1 by the tokens that are not drafted. → [n, T]"""
        logits = self.rows.logits(self.states[part])
        return logits.sub_(self.normalisers[part].unsqueeze(-1)).exp_()


@dataclass(frozen=True)
class Sums:
    """Over the rows of each depth. loss: a scalar that has a gradient, the weighted sum. alpha, match: [D]."""

    loss: Tensor
    alpha: Tensor
    match: Tensor


def summed(predicted: Tensor, rows: Rows, target: TargetLaws, weights: Tensor, loss: Loss) -> Sums:
    """The losses of predicted states [D, N, W].

    rows: of the same tokens as the target's; they make the draft's logits of such states. weights: of the positions in the
    loss, [D, N], 0 for those that don't count. match counts the positions whose best token is the target's best one, as far
    as that is sure to be drafted.
    """
    return Sums(*_Summed.apply(predicted, rows, target, weights, loss))  # type: ignore[no-untyped-call]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, rows: Rows, target: TargetLaws, weights: Tensor, loss: Loss
    ) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(predicted) if wanted else None
        total = predicted.new_zeros(())
        alphas, matches = (predicted.new_zeros(len(predicted)) for _ in range(2))
        step = max(1, AT_ONCE // len(rows.weight))
        for start in range(0, predicted.shape[1], step):
            part = slice(start, start + step)
            probs = target.probs(part)
            mass = probs.sum(-1)
            best, at = probs.max(-1)
            sure = best >= 1.0 - mass  # else a token that is not drafted may be the best
            for depth, states in enumerate(predicted):
                logits, weight = rows.logits(states[part]), weights[depth, part]
                counted = weight > 0
                matches[depth] += ((logits.argmax(-1) == at) & sure & counted).sum()
                row = _Row(probs, mass, logits)
                alphas[depth] += (row.alpha * counted).sum()
                total += (row.loss(loss) * weight).sum()
                if gradient is not None:
                    gradient[depth, part] = row.gradient(loss).mul_(weight.unsqueeze(-1)) @ rows.weight
        ctx.save_for_backward(*([] if gradient is None else [gradient]))
        ctx.mark_non_differentiable(alphas, matches)
        return total, alphas, matches

    @staticmethod
    def backward(ctx: Any, outer: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer, None, None, None, None


class _Row:
    """Some rows of logits beside the target's probabilities p; the logits' memory becomes the draft's probabilities q."""

    def __init__(self, probs: Tensor, mass: Tensor, logits: Tensor) -> None:
        self._probs, self._mass = probs, mass
        highest = logits.amax(-1, keepdim=True)
        likely = torch.linalg.vecdot(probs, logits)
        self._draft = logits.sub_(highest).exp_()
        total = self._draft.sum(-1, keepdim=True)
        self._draft.div_(total)
        self.cross_entropy = (highest + total.log()).squeeze(-1) * mass - likely
        self.alpha = torch.minimum(probs, self._draft).sum(-1)

    def loss(self, kind: Loss) -> Tensor:
        """[n]"""
        lost = 1.0 - self.alpha
        return self.cross_entropy if kind == "kl" else lost if kind == "tv" else self.cross_entropy + lost

    def gradient(self, kind: Loss) -> Tensor:
        """Of the loss by the logits, [n, T]; destroys q.

        Cross-entropy: q Σp - p. Of -alpha: with m where q < p, q Σ(q m) - q m.
        """
        p, q = self._probs, self._draft
        scale = torch.zeros_like(self._mass) if kind == "tv" else self._mass
        below = None
        if kind != "kl":
            below = q * (q < p)
            scale = scale + below.sum(-1)
        q.mul_(scale.unsqueeze(-1))
        if below is not None:
            q.sub_(below)
        return q if kind == "tv" else q.sub_(p)
