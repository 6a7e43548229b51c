"""Closed forms of both papers: what speculation should give, before anything is run.

Notation in code: `alpha` is the acceptance rate E[sum min(target, draft)] (Leviathan Definition 3.1 and
Corollary 3.6), `gamma` the draft length (K in Chen), `c` the cost of a draft step relative to a target step in time,
`c_hat` the same in arithmetic operations. All formulas assume that acceptances are independent and identically
distributed, except `measured_speedup`, which takes measured costs. The papers swap p and q; here the distributions are
`target_probs` and `draft_probs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from outrider.errors import ParameterError
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from torch import Tensor


def _check_probability(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise ParameterError(f"{name} must be in [0, 1], got {value}: it is a mean acceptance probability")


def _check_cost(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise ParameterError(f"{name} must be finite and 0 or more, got {value}: it is draft cost / target cost")


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens per round, (1 - alpha^(gamma+1)) / (1 - alpha) (Leviathan Equation 1).

    Summed as 1 + alpha + ... + alpha^gamma, which is exact at alpha = 1 and does not cancel near it.
    """
    _check_probability("alpha", alpha)
    check_count("gamma", gamma, 0)
    return math.fsum(alpha**i for i in range(gamma + 1))


def limit_tokens(alpha: float) -> float:
    """What `expected_tokens` tends to as gamma grows: 1 / (1 - alpha), infinite at 1 (Leviathan 3.6)."""
    _check_probability("alpha", alpha)
    return math.inf if alpha == 1.0 else 1.0 / (1.0 - alpha)


def alpha_from_tokens(tokens: float, gamma: int) -> float:
    """The alpha at which `expected_tokens(alpha, gamma)` is `tokens`, by bisection; `tokens` in [1, gamma + 1]."""
    check_count("gamma", gamma, 0)
    if gamma == 0 or not 1.0 <= tokens <= gamma + 1:
        raise ParameterError(f"tokens must be in [1, gamma + 1] and gamma 1 or more, got tokens={tokens}, gamma={gamma}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return high


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Speed-up in walltime if scoring gamma + 1 tokens costs what scoring one does (Leviathan Theorem 3.8)."""
    _check_cost("c", c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1.0)


def minimal_walltime_factor(alpha: float, c: float) -> float:
    """What some gamma reaches at least if alpha > c: (1 + alpha) / (1 + c) (Leviathan Corollary 3.9)."""
    _check_probability("alpha", alpha)
    _check_cost("c", c)
    if alpha <= c:
        raise ParameterError(f"alpha must exceed c for an improvement, got alpha={alpha}, c={c}: use a cheaper draft")
    return (1.0 + alpha) / (1.0 + c)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Growth of the total arithmetic operations (Leviathan Theorem 3.11)."""
    _check_cost("c_hat", c_hat)
    return (gamma * c_hat + gamma + 1.0) / expected_tokens(alpha, gamma)


def memory_factor(alpha: float, gamma: int) -> float:
    """Reads of the target's weights and cache relative to plain decoding: 1 / E[tokens] (Leviathan 3.4)."""
    return 1.0 / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, max_gamma: int = 64) -> int:
    """The draft length in 0 … `max_gamma` with the greatest `walltime_factor` (Leviathan 3.5); 0 if none helps.

    With c = 0 and alpha > 0 every further token helps, so the answer is then `max_gamma`.
    """
    check_count("max_gamma", max_gamma, 0)
    return max(range(max_gamma + 1), key=lambda gamma: (walltime_factor(alpha, gamma, c), -gamma))


def oracle_walltime_factor(alpha: float, c: float) -> float:
    """Speed-up if the draft length were known to be exactly what will be accepted (Leviathan 3.5).

    Each round then yields 1 / (1 - alpha) tokens and drafts alpha / (1 - alpha) of them.
    """
    _check_probability("alpha", alpha)
    _check_cost("c", c)
    cost = 1.0 - alpha + c * alpha
    return math.inf if cost == 0.0 else 1.0 / cost


def measured_speedup(alpha: float, gamma: int, draft_seconds: float, verify_seconds: Mapping[int, float]) -> float:
    """Speed-up with measured costs: E[tokens] · t_verify(1) / (gamma · t_draft + t_verify(gamma + 1)).

    `verify_seconds` maps the number of new tokens in one target pass to its seconds; it must hold 1 and gamma + 1.
    """
    if not (math.isfinite(draft_seconds) and draft_seconds >= 0.0):
        raise ParameterError(f"draft_seconds must be finite and 0 or more, got {draft_seconds}")
    missing = [n for n in (1, gamma + 1) if n not in verify_seconds]
    if missing:
        raise ParameterError(f"verify_seconds must hold the time for n={missing[0]}, it has {sorted(verify_seconds)}")
    round_seconds = gamma * draft_seconds + verify_seconds[gamma + 1]
    return expected_tokens(alpha, gamma) * verify_seconds[1] / round_seconds


def loop_seconds(gamma: int, draft_seconds: float, target_seconds: float) -> float:
    """Seconds of a round where verification costs one target step at any length (Chen Figure 1, right)."""
    check_count("gamma", gamma, 0)
    for name, value in (("draft_seconds", draft_seconds), ("target_seconds", target_seconds)):
        if not (math.isfinite(value) and value >= 0.0):
            raise ParameterError(f"{name} must be finite and 0 or more, got {value}")
    return gamma * draft_seconds + target_seconds


def efficiency(alpha: float, gamma: int) -> float:
    """Tokens per round divided by gamma + 1, the most there can be (Chen Figure 1, middle)."""
    return expected_tokens(alpha, gamma) / (gamma + 1)


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Beta = sum min(target, draft) over the last dimension (Leviathan Theorem 3.5). [.., V], [.., V] → [..]"""
    import torch

    return torch.minimum(target_probs, draft_probs).sum(-1)


def d_lk(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """D_LK = ½ sum |target - draft| = 1 - sum min (Leviathan Definition 3.2, Lemma 3.3). [.., V], [.., V] → [..]"""
    return (target_probs - draft_probs).abs().sum(-1) / 2


def match_acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Acceptance of "draw from the target, accept if equal": sum target · draft, never above beta. → [..]"""
    return (target_probs * draft_probs).sum(-1)


def race_acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """How often two exponential races by the same numbers have one winner. [.., V], [.., V] → [..]

    sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x)): at most sum min(p, q), at least sum min / (2 - sum min) (Daliri, Musco,
    Suresh 2025, Theorem 3). Both laws sum to 1.
    """
    import torch

    p, q = target_probs.double(), draft_probs.double()
    both = (p > 0) & (q > 0)
    # p(y) / p(x) is the larger one for all y whose ratio p / q is that of x or more.
    ratio = torch.where(both, p / q, torch.where(p > 0, torch.inf, 0.0))
    order = ratio.argsort(-1, descending=True)
    p, q, both = p.gather(-1, order), q.gather(-1, order), both.gather(-1, order)
    above, below = p.cumsum(-1), (1.0 - q.cumsum(-1)).clamp(min=0.0)
    unknown = (0.0 * (p + q)).sum(-1)  # NaN stays NaN
    return torch.where(both, 1.0 / (above / p + below / q), 0.0).sum(-1) + unknown


def rejection_acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Acceptance of plain rejection sampling: the least value of draft / target (Leviathan A.2).

    With M = max target / draft it is 1 / M, and 0 where the draft excludes a token that the target allows. → [..]
    """
    import torch

    ratio = torch.where(target_probs > 0, draft_probs / target_probs, torch.inf)
    return ratio.amin(-1).clamp(max=1.0)


def lenient_acceptance_probability(target_probs: Tensor, draft_probs: Tensor, lenience: float) -> Tensor:
    """alpha_l = sum min(target / l, draft) for lenience l in (0, 1] (Leviathan A.5). [.., V], [.., V] → [..]"""
    import torch

    if not 0.0 < lenience <= 1.0:
        raise ParameterError(f"lenience must be in (0, 1], got {lenience}: 1 is exact")
    return torch.minimum(target_probs / lenience, draft_probs).sum(-1)
