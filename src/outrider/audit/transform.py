"""The randomised probability integral transform: a token and the law it should follow become one uniform number.

With the vocabulary in some order, u = P(tokens before it) + v · P(tokens tied with it), v uniform (Rosenblatt 1952;
Brockwell 2007 for discrete laws). If every token was drawn from its law, the u are independent and uniform, whatever the
orders, as long as these depend on nothing but the text before (never on *how* a token came about: accepted tokens alone do
not follow the target). Each order makes other faults visible:

- "ratio": by target / draft, where a wrong acceptance or a wrong recovery moves mass from one end to the other;
- "target": by probability, for tempered, truncated or argmax laws;
- "token": by id, in which tokens are drawn by inversion.

Against a fault whose law is known there is a best order of its own (`likelihood_key`).
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDERS = ("ratio", "target", "token")


def keys(target: Tensor, draft: Tensor | None) -> dict[str, Tensor]:
    """What each order sorts by, descending; equal keys are tied. target, draft: [n, V] → [n, V] each

    draft: NaN in rows where nothing was proposed, which are ordered by the target there; None if it is not known.
    """
    ids = -torch.arange(target.shape[-1], device=target.device, dtype=torch.float32)
    found = {"target": target, "token": ids.expand_as(target)}
    if draft is None:
        return found
    ratio = torch.where(target > 0, target / draft, -1.0)  # x / 0 is inf: whatever the draft never says is tied
    return {"ratio": torch.where(draft.isnan(), target, ratio), **found}


def likelihood_key(target: Tensor, law: Tensor) -> Tensor:
    """The order that tells a law from the target best (Neyman and Pearson): by law / target. [n, V], [n, V] → [n, V]"""
    return torch.where(target > 0, law / target, -1.0)


def transform(target: Tensor, order: Tensor, tokens: Tensor, v: Tensor) -> Tensor:
    """U for each token. target, order: [n, V]; tokens: int64 [n]; v: float64 [n] → float64 [n] in [0, 1]"""
    own = order.gather(-1, tokens.unsqueeze(-1))
    before = target.masked_fill(order <= own, 0.0).sum(-1).double()
    tied = target.masked_fill(order != own, 0.0).sum(-1).double()
    return ((before + v * tied) / target.sum(-1).double()).clamp(0.0, 1.0)
