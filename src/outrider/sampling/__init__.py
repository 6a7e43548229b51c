"""Pure functions from logits to a token: standardise, filter, draw."""

from outrider.sampling.draw import draw, draw_each
from outrider.sampling.penalties import Context
from outrider.sampling.race import race
from outrider.sampling.standardize import greedy_leads, greedy_on_host, greedy_tokens, standardize
from outrider.settings.sampling import LogitsProcessor, SamplingSettings

__all__ = [
    "Context",
    "LogitsProcessor",
    "SamplingSettings",
    "draw",
    "draw_each",
    "greedy_leads",
    "greedy_on_host",
    "greedy_tokens",
    "race",
    "standardize",
]
