"""Requests that tiny models are decoded with."""

from __future__ import annotations

from outrider.decode import Request
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings

GREEDY = SamplingSettings()
WARM = SamplingSettings(temperature=1.0, top_p=0.95)
PROMPTS = [[5, 6, 7, 5, 6], [9], [11, 12, 13, 14, 15, 16, 17, 18, 11, 12]]


def requests(new_tokens: int = 24, seed: int = 0, eos: frozenset[int] = frozenset()) -> list[Request]:
    return [Request(p, new_tokens, RandomStream(seed, i), eos) for i, p in enumerate(PROMPTS)]
