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

from outrider.audit.transform import ORDERS

Array = NDArray[np.float64]
REJECT = 1e-4
DOUBT = 1e-2
BINS = 20
PAIR_BINS = 5
FEWEST = 250  # numbers, for a Kolmogorov–Smirnov test of its own
FEWEST_COUNTED = 500  # for a chi-square: ten pairs of neighbours in each cell
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
        return min(1.0, max(1, len(self.checks)) * min((check.p for check in self.checks), default=1.0))

    @property
    def worst(self) -> Check | None:
        """The check with the least p-value."""
        return min(self.checks, key=lambda check: check.p, default=None)


def run_battery(numbers: Mapping[str, Array], places: NDArray[np.int64]) -> Battery:
    """Test the numbers of each order, given in the order of the tokens.

    places: position within the round, -1 where that is not known. An order that is not one of `ORDERS` is that of a fault,
    and gets the one test that is best against it.
    """
    checks: list[Check] = []
    for order, u in numbers.items():
        if len(u) < FEWEST:
            continue
        checks.append(_ks(f"{order} order", u))
        if order not in ORDERS:
            continue
        if len(u) >= FEWEST_COUNTED:
            checks += [_chi_square(f"{order} order", u), _pairs(f"{order} order", u)]
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


def _pairs(name: str, u: Array) -> Check:
    """Each number beside the next one, no number twice, in a grid whose cells are equally likely.

    Across the ends of texts, too: whether a text ends depends on its last token, so pairing within texts would choose pairs
    by what is tested.
    """
    from scipy.stats import chisquare

    cells = np.minimum((u * PAIR_BINS).astype(int), PAIR_BINS - 1)
    first = np.arange(0, len(u) - 1, 2)
    counts = np.bincount(cells[first] * PAIR_BINS + cells[first + 1], minlength=PAIR_BINS**2)
    return Check(f"chi-square of neighbours, {name}", len(first), float(chisquare(counts).pvalue))


def tokens_to_see(u: Array) -> float:
    """How many tokens show a fault nearly always, from the numbers that it would give in its own order.

    Kolmogorov–Smirnov rejects at level `REJECT`, divided by 40 tests, from √n · D = 2.6 on; 1.2 more is over two standard
    deviations. D is taken as 1/√len(u) less than it looks, since it looks larger by 0.9/√len(u) by chance. Infinite if
    nothing is left of it.
    """
    from scipy.stats import kstest

    distance = float(kstest(u, "uniform").statistic) - 1.0 / math.sqrt(len(u)) if len(u) else 0.0
    return float(math.ceil(((2.6 + 1.2) / distance) ** 2 / 100) * 100) if distance > 0 else math.inf


def ks_p(u: Array) -> float:
    """The p-value of one Kolmogorov–Smirnov test."""
    return _ks("", u).p if len(u) else 1.0
