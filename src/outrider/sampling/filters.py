"""Top-k, top-p and min-p without sorting the vocabulary.

Each filter finds a *threshold* and keeps every token at or above it, so that equal tokens share one fate and the result
does not depend on the order in which a kernel happens to list ties (bfloat16 logits tie often).

For top-p, sorting 150,000 tokens costs several times the softmax. On a CPU we select first: any token less likely than
(1 - top_p) / V lies outside the nucleus for certain, since all such tokens together weigh less than 1 - top_p. A higher
floor is tried first, which leaves about a hundred tokens of real text to sort, and lowered if their mass falls short.
On a GPU the size of that selection would have to be read back (a synchronisation), so there the threshold is found by
bisection over the bit patterns of the probabilities, which are ordered as the numbers are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FIRST_FLOOR = 256.0  # times the floor that is certain: leaves a hundred tokens instead of thousands, and mostly enough


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Set all but the `top_k` largest logits to -inf, ties at the edge kept. [N, V] → [N, V]"""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    threshold = torch.topk(logits, top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Zero all outside the nucleus of mass `top_p`, not renormalised (Holtzman 2020). [N, V] → [N, V]

    The nucleus is the smallest set {probs >= t} whose mass reaches `top_p`; it is never empty.
    """
    if top_p >= 1.0:
        return probs
    find = nucleus_threshold_select if probs.device.type == "cpu" else nucleus_threshold_bisect
    return torch.where(probs < find(probs, top_p), 0.0, probs)


def keep_min_p(probs: Tensor, min_p: float) -> Tensor:
    """Zero the tokens less likely than `min_p` × the most likely one, not renormalised. [N, V] → [N, V]"""
    if min_p == 0.0:
        return probs
    return torch.where(probs < min_p * probs.amax(-1, keepdim=True), 0.0, probs)


def nucleus_threshold_select(probs: Tensor, top_p: float) -> Tensor:
    """The least probability in the nucleus, by sorting only tokens that can be in it; on a CPU. [N, V] → [N, 1]"""
    rows = probs.detach().numpy()
    return torch.from_numpy(np.array([[_threshold(row, top_p)] for row in rows], dtype=rows.dtype))


def _threshold(row: NDArray[Any], top_p: float) -> float:
    """Select above a floor, sort what is left, and lower the floor if its mass falls short."""
    needed = top_p * row.sum(dtype=np.float64)
    floor = (1.0 - top_p) / len(row)
    for lowest in (_FIRST_FLOOR * floor, floor, -np.inf):
        ordered = np.sort(row[row > lowest])[::-1]
        reached = np.cumsum(ordered, dtype=np.float64)
        if len(reached) and reached[-1] >= needed:
            return float(ordered[np.searchsorted(reached, needed)])
    return 0.0  # NaN, or rounding left the mass of everything just short of top_p: keep everything


def nucleus_threshold_bisect(probs: Tensor, top_p: float) -> Tensor:
    """The same threshold without a sort and without reading anything back to the host. [N, V] → [N, 1]

    Searches the greatest bit pattern t with mass{probs >= t} >= top_p; non-negative floats order as their bits do.
    """
    integer, bits = (torch.int64, 62) if probs.dtype == torch.float64 else (torch.int32, 30)
    patterns = probs.contiguous().view(integer)
    needed = top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    low = torch.zeros_like(patterns[..., :1])
    for bit in range(bits - 1, -1, -1):
        middle = low + (1 << bit)
        mass = torch.where(patterns >= middle, probs, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        low = torch.where(mass >= needed, middle, low)
    return low.view(probs.dtype)
