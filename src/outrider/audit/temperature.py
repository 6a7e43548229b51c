"""Which temperature the tokens of an audit fit best: the first thing to look at where they don't fit the declared one.

With b = declared / other temperature, the law at the other one is p^b, normalised over where p is positive. The derivative
of the tokens' log-likelihood is S(b) = sum of log p(token) - E_b[log p], which falls as b rises (its own derivative is minus
the sum of the variances), so its root is the likeliest b. S and its slope are added up at a few values of b; between these
a cubic goes through both. Top-k allows the same tokens at any temperature; top-p and min-p do not, so with
these nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import numpy as np
import torch
from torch import Tensor

STEPS = (0.25, 0.5, 0.5**0.5, 1.0, 2.0**0.5, 2.0, 4.0)
"""Inverse temperatures relative to the declared one, closer to each other where most is looked for."""
MATTERS = 4.0  # standard errors by which it differs from the declared one before anything is said
LEAST = 0.01  # and by how much of it
POSITIONS = 1000  # that are read: the error is one or two per cent then
INFORMATION = 10.0  # about the logarithm of the temperature, below which laws tell nothing of it


@dataclass(frozen=True)
class Likeliest:
    """temperature: the likeliest one. error: its standard error; None where the likeliest lies beyond what was looked at:
    `temperature` is the nearest of that, and beyond says on which side it lies, "less" or "more".
    """

    temperature: float
    error: float | None
    beyond: str | None = None


class TemperatureFit:
    """Adds up what tells the temperature of tokens that were drawn from laws like these."""

    def __init__(self) -> None:
        self._scores = torch.zeros(len(STEPS), dtype=torch.float64)
        self._slopes = torch.zeros(len(STEPS), dtype=torch.float64)
        self._read = 0

    @property
    def wanted(self) -> int:
        """How many positions more are read."""
        return POSITIONS - self._read

    def add(self, law: Tensor, tokens: Tensor) -> None:
        """law: at the declared temperature, [n, V]. tokens: [n], each with a positive probability."""
        law, tokens = law[: self.wanted], tokens[: self.wanted]
        self._read += len(law)
        surprise = law.log().float()  # [n, V], -inf where nothing is allowed
        taken = surprise.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        finite = surprise.masked_fill(surprise.isneginf(), 0.0)
        for i, step in enumerate(STEPS):
            other = (step * surprise).softmax(-1)
            mean = (other * finite).sum(-1)
            spread = (other * (finite - mean.unsqueeze(-1)).square()).sum(-1)
            self._scores[i] += float((taken - mean).double().sum())
            self._slopes[i] -= step * float(spread.double().sum())  # by the logarithm of b

    def gain(self, declared: float, other: float) -> float:
        """By how much another temperature makes the tokens likelier than the declared one: the integral of S from 1 to b."""
        at = np.geomspace(1.0, declared / other, 200)
        return float(np.trapezoid([self._score(float(b)) for b in at], at))

    def _score(self, b: float) -> float:
        """S, by the cubic through the values and slopes on both sides."""
        right = next((i for i, step in enumerate(STEPS) if step >= b and i), len(STEPS) - 1)
        width = log(STEPS[right] / STEPS[right - 1])
        values, slopes = self._scores[right - 1 : right + 1].tolist(), self._slopes[right - 1 : right + 1].tolist()
        return _cubic(log(b / STEPS[right - 1]) / width, values, [width * slope for slope in slopes])

    def likeliest(self, declared: float) -> Likeliest | None:
        """None if nothing tells, as where every law has one token."""
        scores, slopes = self._scores.tolist(), self._slopes.tolist()
        if -min(slopes) < INFORMATION:
            return None
        if scores[0] <= 0.0 or scores[-1] >= 0.0:
            hotter = scores[0] <= 0.0
            return Likeliest(declared / STEPS[0 if hotter else -1], None, "more" if hotter else "less")
        right = next(i for i, score in enumerate(scores) if score < 0.0)
        width = log(STEPS[right] / STEPS[right - 1])
        low, high = 0.0, 1.0
        for _ in range(50):  # the cubic is above 0 on the left and below on the right
            middle = (low + high) / 2
            above = self._score(STEPS[right - 1] * exp(middle * width))
            low, high = (middle, high) if above > 0.0 else (low, middle)
        slope = slopes[right - 1] + low * (slopes[right] - slopes[right - 1])
        temperature = declared / (STEPS[right - 1] * exp(low * width))
        # By the logarithm of b the information is b² times the variances, which is b times minus the slope here.
        information = -slope * declared / temperature
        return Likeliest(temperature, temperature / information**0.5) if information > 0.0 else None


def told(fit: Likeliest | None, declared: float) -> str:
    """A remark for the reason of a verdict, empty if the declared temperature, or 0, fits."""
    if fit is None:
        return ""
    at, error = fit.temperature, fit.error
    if error is None:
        if fit.beyond == "less" and declared == 0.0:
            return ""
        found = f"{at:.2g} or {fit.beyond}"
    elif declared and abs(at - declared) <= max(MATTERS * error, LEAST * declared):
        return ""
    else:
        found = f"{at:.3g} ± {error:.1g}"
    return f"; of all temperatures {found} fits the tokens best, declared is {declared:g}"


def _cubic(at: float, values: list[float], slopes: list[float]) -> float:
    """Hermite's, on [0, 1]."""
    (a, b), (da, db) = values, slopes
    rest = 1.0 - at
    return a * rest * rest * (1 + 2 * at) + da * at * rest * rest + b * at * at * (3 - 2 * at) - db * at * at * rest
