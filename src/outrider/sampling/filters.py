"""Top-k, top-p and min-p without sorting the vocabulary.

Each filter finds a *threshold* and keeps every token at or above it, so that equal tokens share one fate and the result
does not depend on the order in which a kernel happens to list ties (bfloat16 logits tie often).

For top-p, sorting 150,000 tokens costs several times the softmax. On a CPU we select first: any token less likely than
(1 - top_p) / V lies outside the nucleus for certain, since all such tokens together weigh less than 1 - top_p; what is
left is a few hundred tokens on real text, and in the worst case all of them, so the fall-back needs no code of its own.
On a GPU the size of that selection would have to be read back (a synchronisation), so there the threshold is found by
bisection over the bit patterns of the probabilities, which are ordered as the numbers are.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    find = nucleus_threshold_bisect if probs.is_cuda else nucleus_threshold_select
    return probs.masked_fill(probs < find(probs, top_p), 0.0)


def keep_min_p(probs: Tensor, min_p: float) -> Tensor:
    """Zero the tokens less likely than `min_p` × the most likely one, not renormalised. [N, V] → [N, V]"""
    if min_p == 0.0:
        return probs
    return probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)


def nucleus_threshold_select(probs: Tensor, top_p: float) -> Tensor:
    """The least probability in the nucleus, by sorting only the tokens that can be in it. [N, V] → [N, 1]"""
    floor = (1.0 - top_p) / probs.shape[-1]
    thresholds = []
    for row in probs.unbind(0):
        candidates = row[row > floor].sort(descending=True).values
        if candidates.numel() == 0:  # only NaN rows, or rounding in a flat row: keep everything, NaN is caught on drawing
            thresholds.append(row.new_zeros(()))
            continue
        reached = candidates.cumsum(-1, dtype=torch.float64)
        # Rounding may leave the whole mass just short of top_p: then the last candidate closes the nucleus.
        index = int((reached < top_p * row.sum(dtype=torch.float64)).sum().clamp(max=len(candidates) - 1))
        thresholds.append(candidates[index])
    return torch.stack(thresholds).unsqueeze(-1)


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
