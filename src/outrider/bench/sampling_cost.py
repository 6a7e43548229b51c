"""What standardising costs at a vocabulary of 152,000, beside doing it with a full sort."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.bench.statistics import Spread, spread
from outrider.sampling import SamplingSettings, draw, standardize

VOCABULARY = 151_936
REPEATS = 21


def realistic_logits(rows: int) -> Tensor:
    """Logits with the tail of a language model's: a few likely tokens over a wide bell. float32 [rows, V]"""
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(rows, VOCABULARY, generator=generator)
    logits[:, :50] += torch.linspace(14.0, 4.0, 50)
    return logits


def sorted_standardize(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """The same law by sorting the whole vocabulary, as most implementations do."""
    ordered, index = (logits / settings.temperature).sort(descending=True, dim=-1)
    probs = ordered.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= settings.top_p, 0.0)
    if settings.top_k:
        probs[:, settings.top_k :] = 0.0
    probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, index, probs)


def measure(rows: int = 5) -> dict[str, dict[str, Spread]]:
    """Milliseconds for `rows` rows: {settings: {"selection" | "sort" | "draw": spread}}, alternated."""
    logits = realistic_logits(rows)
    cases = {
        "greedy": SamplingSettings(),
        "temperature 0.8": SamplingSettings(temperature=0.8),
        "top-k 50": SamplingSettings(temperature=0.8, top_k=50),
        "top-p 0.95": SamplingSettings(temperature=0.8, top_p=0.95),
        "top-p 0.95, flat": SamplingSettings(temperature=5.0, top_p=0.95),
    }
    found = {}
    for name, settings in cases.items():
        calls: dict[str, Callable[[], object]] = {"selection": lambda s=settings: standardize(logits, s)}  # type: ignore[misc]
        if settings.top_k or settings.top_p < 1:
            calls["sort"] = lambda s=settings: sorted_standardize(logits, s)  # type: ignore[misc]
        probs = standardize(logits, settings)
        uniforms = torch.full((rows,), 0.7, dtype=torch.float64)
        calls["draw"] = lambda p=probs, u=uniforms: draw(p, u)  # type: ignore[misc]
        found[name] = _alternate(calls)
    return found


def _alternate(calls: dict[str, Callable[[], object]]) -> dict[str, Spread]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat >= 2:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: spread(values) for name, values in times.items()}
