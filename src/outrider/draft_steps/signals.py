"""How sure a drafter was of a token it drew, in a few classes: what the draft-length policy learns acceptance for.

The signal is the draft's own probability of the token at temperature 1, before any filter: at temperature 0 the law is
one-hot and tells nothing. It belongs to a token that is offered in any case, and only decides about the next one. The
law's entropy, the margin to the second best token and the position predict nothing beyond it (EXPERIMENTS.md).

The same for tokens that were not drawn, as alternatives (`proposal.Alternatives`): the probability that such a one is the
recovered token is learned for classes of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.kernels.sampling import reading
from outrider.sampling.draw import on_host
from outrider.support.device_data import row_by_row, to_device

EDGES = (0.2, 0.4, 0.6, 0.75, 0.87, 0.95, 0.99)
# Acceptance assumed for each class at first; what is tested of the class soon outweighs it.
PRIORS = (0.25, 0.45, 0.6, 0.7, 0.8, 0.87, 0.93, 0.98)

LEAST_LIKELY = 0.02
LIKELY = (0.04, 0.08, 0.15, 0.25, 0.4)
LIKELY_PRIORS = (0.03, 0.055, 0.11, 0.2, 0.33, 0.45)  # greedy, a head's probability is right; sampled, half of it and less
MOST_OTHERS = 8


class Shares:
    """What a draft gave to the tokens at one place, at temperature 1: computed once for its signal and the alternatives.

    logits: [T], float32 or float64, of the draft's own tokens, which go by their columns here.
    """

    def __init__(self, logits: NDArray[Any]) -> None:
        with np.errstate(invalid="ignore"):  # -inf everywhere
            self._weights: NDArray[Any] = np.exp(logits - logits.max())
        self._total = float(self._weights.sum())

    def signal(self, token: int) -> int:
        """The class of a token: 0 … len(EDGES)."""
        with np.errstate(invalid="ignore"):
            return bisect_left(EDGES, float(self._weights[token] / self._total))

    def others(self, drawn: int, count: int | None = None) -> list[tuple[int, float]]:
        """Tokens that might have come instead, the likeliest first, and their probabilities.

        count: so many of them; None: those of `LEAST_LIKELY` at least, `MOST_OTHERS` at most.
        """
        weights, total = self._weights, self._total
        if not total > 0.0:
            return []
        if count is None:
            found = np.flatnonzero(weights > LEAST_LIKELY * total)
        else:
            found = np.argpartition(-weights, min(count, len(weights) - 1))[: count + 1]
        each = zip(found.tolist(), weights[found].tolist(), strict=True)
        ranked = sorted((-weight, token) for token, weight in each if token != drawn and weight > 0.0)
        return [(token, -weight / total) for weight, token in ranked[: MOST_OTHERS if count is None else count]]


def shares_of(logits: Tensor) -> list[Shares]:
    """Of each row. [R, T] → R. Reads back."""
    wide = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    return [Shares(row) for row in on_host(wide.cpu())]


def likely_class(probability: float) -> int:
    """0 … len(LIKELY)"""
    return bisect_left(LIKELY, probability)


def token_signals(logits: Tensor, tokens: Tensor) -> list[int]:
    """The class of each row's token. logits [R, V], tokens int64 [R] → R numbers in 0 … len(EDGES). Reads back."""
    ours = reading(logits)
    if ours is not None:
        return [bisect_left(EDGES, share) for share in ours.shares(logits, tokens).tolist()]
    if row_by_row(logits):  # NumPy's operations are lighter beside a model: see `verify.verify_on_host`
        return [shares.signal(token) for shares, token in zip(shares_of(logits), tokens.tolist(), strict=True)]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    law = logits.softmax(-1)
    probs = law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    edges = to_device(EDGES, probs.device, probs.dtype)
    return torch.bucketize(probs, edges).tolist()
