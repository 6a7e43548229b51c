"""A token outside the law: rounding, or a fault?

Truncation and temperature 0 give probability 0 to most tokens. An engine whose logits differ from the audit's in the last
bits may keep a token at the very edge that the audit leaves out, so the edge is widened by the rounding of the engine, and
no further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.audit.greedy import logits_by_width
from outrider.models.base import LanguageModel, Source
from outrider.sampling import SamplingSettings, standardize


def engine_rounding(target: LanguageModel, tokens: Sequence[int], here: Tensor, source: Source | None = None) -> float:
    """The most by which a logit after `tokens` varies with the width of the pass that scores it.

    here: [V], what the audit's own pass gave.
    """
    ways = torch.cat([logits_by_width(target, tokens, source).double(), here.double().cpu().unsqueeze(0)])
    ways = ways - ways.logsumexp(-1, keepdim=True)
    spread = (ways.amax(0) - ways.amin(0))[ways.amax(0) > ways.amax() - 20]  # what can matter
    return float(spread.nan_to_num(0.0).max())


def rounding_needed(logits: Tensor, token: int, settings: SamplingSettings) -> float:
    """By how much logits must differ from these to allow the token, to a hundredth of itself; infinite if none can. [V]"""
    low, high = 0.0, 1e-6
    while not within_rounding(logits, token, settings, high):
        low, high = high, 4.0 * high
        if high > 64.0:
            return math.inf
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if within_rounding(logits, token, settings, middle) else (middle, high)
    return high


def within_rounding(logits: Tensor, token: int, settings: SamplingSettings, rounding: float) -> bool:
    """Whether logits that differ from these by at most `rounding` each would allow the token. logits: [V], processed

    Necessary for being allowed by some such logits, not sufficient: in doubt it says yes.
    """
    logits = logits.double()
    own = logits[token]
    if not bool(own > -torch.inf):
        return False  # excluded by a processor or a bias, which no rounding brings back
    ahead = logits > own + 2 * rounding
    if settings.greedy:
        return not bool(ahead.any())
    if settings.top_k and int(ahead.sum()) >= settings.top_k:
        return False
    weights = ((logits - logits.max()) / settings.temperature).exp()
    if settings.top_k:  # the most that can be kept: ties at the edge stay together
        edge = logits.topk(min(settings.top_k, len(logits))).values[-1]
        weights = weights.where(logits >= edge - 2 * rounding, 0.0)
    factor = math.exp(-min(2 * rounding / settings.temperature, 700.0))
    if settings.top_p < 1.0 and float(weights[ahead].sum() / weights.sum()) * factor >= settings.top_p:
        return False
    relative = math.exp(min(float(own - logits.max()) / settings.temperature, 0.0))
    return relative >= settings.min_p * factor


def truncated_first(logits: Tensor, token: int, settings: SamplingSettings) -> bool:
    """Whether the token would be allowed if truncation came before the temperature, as in llama.cpp: another distribution.

    logits: [V], processed
    """
    truncated = SamplingSettings(temperature=1.0, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p)
    return bool(standardize(logits.unsqueeze(0), truncated)[0, token] > 0)
