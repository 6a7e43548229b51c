"""Drawing a token from weights with one explicit uniform number, by inversion of the cumulative sum.

One number a draw (and not one per vocabulary entry, as with Gumbel noise) keeps the randomness of a round small enough to
be made on the host and sent along, so that the same seed gives the same draws on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds uniform × total. [.., V], [..] in [0, 1) → int64 [..]

    A token of weight 0 is never drawn. Weights need not be normalised. A row that is not a distribution (NaN, infinite or
    zero total) gives -1. The sum is taken in float64, so that the error in the law stays near 1e-16 × V.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    below = torch.nextafter(total, torch.zeros_like(total))  # uniform × total may round up to total itself
    point = torch.minimum(uniforms.to(total).unsqueeze(-1) * total, below)
    token = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    valid = (total.isfinite() & (total > 0)).squeeze(-1)
    return torch.where(valid, token, -1)
