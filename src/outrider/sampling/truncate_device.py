"""Top-k, top-p and min-p on a GPU, and on a CPU at small vocabularies: no sort, and nothing read back to the host.

Each filter finds a *threshold* and keeps every token at or above it, so that equal tokens share one fate and the result
does not depend on the order in which a kernel happens to list ties (bfloat16 logits tie often).

For top-p, sorting 150,000 tokens costs several times the softmax. Selecting first, as `truncate_host` does, would have to
read the size of the selection back (a synchronisation), so here the threshold is found by bisection over the bit patterns
of the probabilities, which are ordered as the numbers are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncated(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The sampled law of logits. float32 or float64 [N, V] → [N, V]; NaN for a row without a law."""
    probs = softmax(_keep_top_k(logits, top_k), temperature)
    probs = _keep_min_p(_keep_top_p(probs, top_p), min_p)
    return probs.div_(probs.sum(-1, keepdim=True))


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """Shifted before it is divided, so that a small temperature can't overflow. [N, V] → [N, V], new"""
    if temperature != 1.0:
        logits = (logits - logits.amax(-1, keepdim=True)).div_(temperature)
    return logits.softmax(-1)


def _keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Set all but the `top_k` largest logits to -inf, ties at the edge kept. [N, V] → [N, V]"""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    threshold = torch.topk(logits, top_k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    """Zero all outside the nucleus of mass `top_p`, not renormalised (Holtzman 2020). [N, V] → [N, V]

    The nucleus is the smallest set {probs >= t} whose mass reaches `top_p`; it is never empty.
    """
    if top_p >= 1.0:
        return probs
    return probs.masked_fill_(probs < _nucleus_threshold(probs, top_p), 0.0)


def _keep_min_p(probs: Tensor, min_p: float) -> Tensor:
    """Zero the tokens less likely than `min_p` × the most likely one, not renormalised. [N, V] → [N, V]"""
    if min_p == 0.0:
        return probs
    return probs.masked_fill_(probs < min_p * probs.amax(-1, keepdim=True), 0.0)


def _nucleus_threshold(probs: Tensor, top_p: float) -> Tensor:
    """The least probability in the nucleus. [N, V] → [N, 1]

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
