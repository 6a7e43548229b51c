"""Log-probabilities that a round reports beside its tokens: the tokens' own, and those of the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from outrider.records import TopLogprobs
from outrider.settings.extras import Extras


def told_of(logits: Tensor, tokens: Tensor, extras: Extras) -> Tensor:
    """Log softmax of the raw logits (temperature 1, no processors).

    [..., V], int64 [...] → [..., 1 + 2 · top]: that of the token (anything for -1, which is none), those of the most
    probable tokens, and which these are, in float32 or more, in which ids are exact.
    """
    chosen = tokens.clamp(min=0)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    norm = wide.logsumexp(-1, keepdim=True)
    found = [wide.gather(-1, chosen.unsqueeze(-1)) - norm]
    if extras.top_logprobs:
        best = wide.topk(extras.top_logprobs, dim=-1)
        found += [best.values - norm, best.indices.to(wide.dtype)]
    return torch.cat(found, dim=-1)


def own(told: Many[float], extras: Extras) -> tuple[float, ...]:
    """Of what was read back, position by position: the tokens' own."""
    return tuple(told[:: extras.told])


def best(told: Many[float], extras: Extras) -> tuple[TopLogprobs, ...] | None:
    """The most probable tokens of each position, (token, log-probability), None where they were not asked for."""
    top = extras.top_logprobs
    if not top:
        return None
    places = range(0, len(told), extras.told)
    return tuple(tuple((int(told[at + top + i]), told[at + i]) for i in range(1, top + 1)) for at in places)
