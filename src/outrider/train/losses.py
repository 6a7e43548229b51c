"""How far a draft's law is from the target's, per position. Both losses look at the head's own tokens only.

kl: forward Kullback–Leibler, as cross-entropy with the target's probabilities (soft targets; they differ by the target's
entropy, which no weight changes). tv: total variation D_LK = 1 - sum min(target, draft) (Leviathan 3.3), which is 1 - alpha
itself: what the target gives to tokens outside the head's vocabulary counts as lost. mix: their sum; tv alone has next to no
gradient where the draft is far off.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from outrider.errors import ParameterError

Loss = Literal["kl", "tv", "mix"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


def check_loss(name: str) -> Loss:
    """The loss of that name."""
    for loss in LOSSES:
        if loss == name:
            return loss
    raise ParameterError(f"loss must be {', '.join(LOSSES[:-1])} or {LOSSES[-1]}, got {name!r}")


def divergence(target_probs: Tensor, draft_logits: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """The loss and alpha = sum min(target, draft) at temperature 1. [.., T] twice → [..] twice

    target_probs may sum to less than 1: what is missing lies outside the vocabulary.
    """
    log_draft = draft_logits.float().log_softmax(-1)
    cross_entropy = -(target_probs * log_draft).sum(-1) if loss != "tv" else torch.zeros(())
    alpha = torch.minimum(target_probs, log_draft.exp()).sum(-1)
    if loss == "kl":
        return cross_entropy, alpha
    return cross_entropy + (1.0 - alpha), alpha
