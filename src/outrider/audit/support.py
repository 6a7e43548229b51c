"""A token outside the law: rounding, or a fault?

Truncation and temperature 0 give probability 0 to most tokens. An engine whose logits differ from the audit's in the last
bits may keep a token at the very edge that the audit leaves out, so the edge is widened by the rounding of the engine, and
no further.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.audit.greedy import logits_by_width
from outrider.models.base import LanguageModel
from outrider.sampling import SamplingSettings, standardize


def engine_rounding(target: LanguageModel, tokens: Sequence[int]) -> float:
    """The most by which a logit after `tokens` varies with the width of the pass that scores it."""
    ways = logits_by_width(target, tokens)
    ways = ways - ways.logsumexp(-1, keepdim=True)
    spread = (ways.amax(0) - ways.amin(0))[ways.amax(0) > ways.amax() - 20]  # what can matter
    return float(spread.nan_to_num(0.0).max())


def within_rounding(logits: Tensor, token: int, settings: SamplingSettings, rounding: float) -> bool:
    """Whether logits that differ from these by at most `rounding` each would allow the token. logits: [V], processed

    Necessary for being allowed by some such logits, not sufficient: in doubt it says yes.
    """
    logits = logits.double()
    own = logits[token]
    if not bool(own > -torch.inf):
        return False  # excluded by a processor or a bias, which no rounding brings back
    ahead = logits > own + 2 * rounding
    if settings.greedy or (settings.top_k and int(ahead.sum()) >= settings.top_k):
        return not bool(ahead.any()) if settings.greedy else False
    kept = standardize(logits.unsqueeze(0), replace(unfiltered(settings), top_k=settings.top_k))[0]
    factor = math.exp(-min(2 * rounding / settings.temperature, 700.0))
    if settings.top_p < 1.0 and float(kept[ahead].sum()) * factor >= settings.top_p:
        return False
    relative = math.exp(min(float(own - logits.max()) / settings.temperature, 0.0))
    return relative >= settings.min_p * factor


def unfiltered(settings: SamplingSettings) -> SamplingSettings:
    """The temperature alone: for logits that bias, penalties and processors have gone through."""
    return SamplingSettings(temperature=settings.temperature or 1.0)


def processed_only(settings: SamplingSettings) -> SamplingSettings:
    """Bias, penalties and processors alone."""
    return replace(settings, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
