"""Laws in rows of few tokens, how far two are apart, and filters worked by sorting."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.acceptance.verify import Uniforms
from outrider.sampling import draw
from tests.helpers.enumerate import Law, Rule, round_joint, target_joint

EXACT = 1e-12


def distance(rule: Rule, target: Law, draft: Law | int | None, vocabulary: int, length: int) -> float:
    """The largest difference between the two joint laws."""
    joint = round_joint(rule, target, draft, vocabulary, length)
    assert abs(float(joint.sum()) - 1.0) < EXACT
    return float((joint - target_joint(target, vocabulary, length + 1)).abs().max())


def sparse_rows(
    seed: int, vocabulary: int, length: int, point_mass: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Uniforms, Tensor]:
    """For four rows of the rule. Sparse laws: disjoint and equal supports, residuals of nothing are among them."""
    generator = torch.Generator().manual_seed(seed)

    def laws(*shape: int) -> Tensor:
        weights = torch.rand(*shape, vocabulary, generator=generator, dtype=torch.float64).pow(6).round(decimals=2)
        weights[..., 0] += (weights.sum(-1) == 0).double()
        return (weights / weights.sum(-1, keepdim=True)).to(dtype)

    rows = 4
    target, draft = laws(rows, length + 1), laws(rows, length)
    draft[0] = target[0, :length]
    tokens = draw(draft, torch.rand(rows, length, generator=generator, dtype=torch.float64))
    offered = torch.randint(length + 1, (rows,), generator=generator)
    numbers = torch.rand(rows, length + 1, generator=generator, dtype=torch.float64)
    numbers[1] = 0.0
    return target, None if point_mass else draft, tokens, Uniforms(numbers[:, 1:], numbers[:, 0]), offered


def by_sorting(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The law of one row, filter by filter with full sorts, for comparison."""
    ordered = logits.sort(descending=True).values
    logits = logits.masked_fill(logits < ordered[min(top_k or len(logits), len(logits)) - 1], -math.inf)
    probs = (logits / temperature).softmax(-1)
    ordered = probs.sort(descending=True).values
    edge = int((ordered.cumsum(-1) >= top_p).long().argmax()) if top_p < 1 else len(ordered) - 1
    probs = probs.where(probs >= max(ordered[edge], min_p * ordered[0]), 0.0)
    return probs / probs.sum()
