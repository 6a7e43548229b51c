"""Are these numbers independent and uniform? A battery of tests, with its false-alarm rate and what it can see.

Kolmogorov–Smirnov and chi-square on all numbers of an order, Kolmogorov–Smirnov on those of each place within a round, and
chi-square on pairs of neighbours for independence. The least p-value times the number of tests (Bonferroni) is the p-value
of the whole: an exact sampler is called not exact with a probability below `REJECT`, and in doubt below `DOUBT`, whatever
the dependence of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
REJECT = 1e-4
DOUBT = 1e-2
BINS = 20
PAIR_BINS = 5
FEWEST = 250  # numbers, for a test of its own: five pairs of neighbours in each cell
LAST_PLACE = 8  # places within a round from here on are taken together


@dataclass(frozen=True)
class Check:
    """One test. name: which. count: numbers tested. p: its p-value."""

    name: str
    count: int
    p: float


@dataclass(frozen=True)
class Battery:
    """All tests of one sample."""

    checks: tuple[Check, ...]

    @property
    def p(self) -> float:
        """Of the whole battery."""
        return min(1.0, len(self.checks) * min((check.p for check in self.checks), default=1.0))

    @property
    def worst(self) -> Check | None:
        """The check with the least p-value."""
        return min(self.checks, key=lambda check: check.p, default=None)


def run_battery(numbers: Mapping[str, Array], texts: NDArray[np.int64], places: NDArray[np.int64]) -> Battery:
    """Test the numbers of each order.

    texts: which text each number belongs to; neighbours in one text are paired. places: position within the round, -1 where
    that is not known.
    """
    checks: list[Check] = []
    for order, u in numbers.items():
        if len(u) < FEWEST:
            continue
        checks += [_ks(f"{order} order", u), _chi_square(f"{order} order", u), _pairs(f"{order} order", u, texts)]
        checks += [
            _ks(f"{order} order, place {place + 1} of a round{' and on' * (place == LAST_PLACE)}", u[chosen])
            for place in range(LAST_PLACE + 1)
            if (chosen := np.minimum(places, LAST_PLACE) == place).sum() >= FEWEST
        ]
    return Battery(tuple(checks))


def _ks(name: str, u: Array) -> Check:
    from scipy.stats import kstest

    return Check(f"Kolmogorov–Smirnov, {name}", len(u), float(kstest(u, "uniform").pvalue))


def _chi_square(name: str, u: Array) -> Check:
    from scipy.stats import chisquare

    counts, _ = np.histogram(u, BINS, (0.0, 1.0))
    return Check(f"chi-square, {name}", len(u), float(chisquare(counts).pvalue))


def _pairs(name: str, u: Array, texts: NDArray[np.int64]) -> Check:
    """Each number beside the next one of its text, no number twice, in a grid whose cells are equally likely."""
    from scipy.stats import chisquare

    cells = np.minimum((u * PAIR_BINS).astype(int), PAIR_BINS - 1)
    first = np.concatenate([np.flatnonzero(texts == text)[:-1:2] for text in np.unique(texts)])
    counts = np.bincount(cells[first] * PAIR_BINS + cells[first + 1], minlength=PAIR_BINS**2)
    return Check(f"chi-square of neighbours, {name}", len(first), float(chisquare(counts).pvalue))


def tokens_to_see(numbers: Mapping[str, Array]) -> float:
    """How many tokens a battery needs to see this fault nearly always, from the numbers that it would give.

    The Kolmogorov–Smirnov distance D of the best order is passed by chance at level `REJECT` (and 40 tests) with √n · D >
    2.6; 1.2 more is two standard deviations of √n · D under the fault, rounded up. Infinite if D is within chance.
    """
    distance, count = max((_distance(u), len(u)) for u in numbers.values())
    if distance * math.sqrt(count) < 1.63:  # passed by one correct sample in a hundred
        return math.inf
    return float(math.ceil(((2.6 + 1.2) / distance) ** 2 / 100) * 100)


def _distance(u: Array) -> float:
    from scipy.stats import kstest

    return float(kstest(u, "uniform").statistic)
