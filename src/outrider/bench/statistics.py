"""Medians and spread of paired measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} – {self.high:.2f})"


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of the values; NaN for none."""
    if not values:
        return Spread(float("nan"), float("nan"), float("nan"))
    low, median, high = np.quantile(np.asarray(values), [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high))


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Our rate over theirs, prompt by prompt."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def captured_share(speedup: float, oracle: float) -> float | None:
    """Of the oracle's gain in time the share that was had, both as speed-ups; None where next to nothing is to be gained."""
    gain = 1.0 - 1.0 / oracle
    return (1.0 - 1.0 / speedup) / gain if gain > 0.03 else None
