"""Top-k, top-p and min-p on a CPU, at the vocabulary of a real model.

Exponentials of the whole row, and everything after them on the few tokens that may stay.

Any token less likely than (1 - top_p) / V lies outside the nucleus for certain, since all such tokens together weigh less
than 1 - top_p. A higher floor is tried first, which leaves about a hundred tokens of real text to sort, and lowered if
their mass falls short; top-k lowers a floor likewise until it has left k tokens. Row by row, in NumPy: beside a model whose
weights have just swept the caches, the number of operations is what costs, and NumPy's are lighter than torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
_CERTAIN_TIMES = 256.0  # the first floor over the certain one: leaves a hundred tokens instead of thousands, mostly enough
_BELOW = (7.0, 14.0, np.inf)  # floors for top-k, below the best logit


def truncated(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The sampled law of logits that are on a CPU. float32 or float64 [N, V] → [N, V]; NaN for a row without a law."""
    laws = torch.zeros_like(logits)
    with np.errstate(over="ignore"):  # logits that some processors set to the least number there is
        _fill(laws, logits, temperature, top_k, top_p, min_p)
    return laws


def _fill(laws: Tensor, logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    for row, law in zip(logits.detach().numpy(), laws.numpy(), strict=True):
        best = row.max()
        if not np.isfinite(best):
            law.fill(np.nan)
            continue
        among = _largest(row, best, top_k) if 0 < top_k < len(row) else None
        weights = (row if among is None else row[among]) - best  # shifted, so that a small temperature can't overflow
        if temperature != 1.0:
            weights /= temperature
        np.exp(weights, out=weights)
        kept = _nucleus(weights, top_p) if top_p < 1.0 else np.flatnonzero(weights >= min_p)
        chosen = weights[kept]
        if min_p > 0.0:
            likely = chosen >= min_p  # the most likely token has weight 1
            kept, chosen = kept[likely], chosen[likely]
        law[kept if among is None else among[kept]] = chosen / chosen.sum(dtype=np.float64)


def _largest(row: Array, best: float, count: int) -> Array:
    """The indices of the `count` largest, ties at the edge kept; none that is excluded. row [V] → int64 [S]"""
    for below in _BELOW:
        where = np.flatnonzero(row > best - below)
        if len(where) >= count:
            chosen = row[where]
            where = where[chosen >= np.partition(chosen, -count)[-count]]
            break
    return where


def _nucleus(weights: Array, top_p: float) -> Array:
    """The indices of the smallest set {weights >= t} whose share reaches `top_p`; never empty. weights [V] → int64 [S]"""
    total = float(weights.sum())
    certain = (1.0 - top_p) / len(weights) * total
    for lowest in (_CERTAIN_TIMES * certain, certain, -1.0):
        where = np.flatnonzero(weights > lowest)
        chosen = weights[where]
        ordered = np.sort(chosen)[::-1]
        reached = np.cumsum(ordered, dtype=np.float64)
        if len(reached) and reached[-1] >= top_p * total:
            break
    edge = min(int(np.searchsorted(reached, top_p * total)), len(ordered) - 1)  # rounding may leave all just short of it
    inside: Array = where[chosen >= ordered[edge]]
    return inside
