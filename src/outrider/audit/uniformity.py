"""Are these numbers independent and uniform? A battery of tests, with its false-alarm rate and what it can see.

Kolmogorov–Smirnov and chi-square on all numbers of an order, Kolmogorov–Smirnov on those of each place within a round and on
those of bonus tokens, and for independence chi-square on pairs: neighbours, some further apart, and the same positions of
two texts (numbers that rows of a batch share). The least p-value times the number of tests (Bonferroni) is the p-value
of the whole: an exact sampler is called not exact with a probability below `REJECT`, and in doubt below `DOUBT`, whatever
the dependence of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.audit.transform import ORDERS

Array = NDArray[np.float64]
REJECT = 1e-4
DOUBT = 1e-2
BINS = 20
PAIR_BINS = 5
FEWEST = 30  # numbers, for a Kolmogorov–Smirnov test of its own, whose p-values are exact for few
FEWEST_COUNTED = 500  # for a chi-square: ten pairs of neighbours in each cell
LAST_PLACE = 8  # places within a round from here on are taken together
LAGS = 5  # how far apart the tokens of a pair are at most


@dataclass(frozen=True)
class Check:
    """One test. name: which. count: numbers tested. p: its p-value."""

    name: str
    count: int
    p: float


@dataclass(frozen=True)
class Battery:
    """All tests of one sample. audits: how many such samples share one verdict."""

    checks: tuple[Check, ...]
    audits: int = 1

    @property
    def tests(self) -> int:
        """Those that the least p-value is one of."""
        return self.audits * len(self.checks)

    @property
    def p(self) -> float:
        """Of the whole battery."""
        return min(1.0, max(1, self.tests) * min((check.p for check in self.checks), default=1.0))

    @property
    def worst(self) -> Check | None:
        """The check with the least p-value."""
        return min(self.checks, key=lambda check: check.p, default=None)


@dataclass(frozen=True)
class Marks:
    """Where each number comes from, [n] each; empty where that is not known.

    places: of the token within its round, -1 where that is not known. bonus: whether it followed a fully accepted draft, or
    a token that had been foreseen. texts: the number of its text. positions: of the token in it.
    """

    places: NDArray[np.int64]
    bonus: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    texts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    positions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


def run_battery(numbers: Mapping[str, Array], marks: Marks) -> Battery:
    """Test the numbers of each order, given in the order of the tokens.

    An order that is not one of `ORDERS` is that of a fault, and gets the one test that is best against it.
    """
    places = np.minimum(marks.places, LAST_PLACE)
    groups = {
        f"place {place + 1} of a round{' and on' * (place == LAST_PLACE)}": places == place
        for place in range(LAST_PLACE + 1)
    }
    groups |= {"bonus tokens": marks.bonus} if len(marks.bonus) else {}
    first, second = _same_positions(marks)
    checks: list[Check] = []
    for order, u in numbers.items():
        if len(u) < FEWEST:
            continue
        checks.append(_ks(f"{order} order", u))
        if order not in ORDERS:
            continue
        if len(u) >= FEWEST_COUNTED:
            checks.append(_chi_square(f"{order} order", u))
            checks += [_pairs(f"{_apart(lag)}, {order} order", *_at_lag(u, lag)) for lag in range(1, LAGS + 1)]
        if len(first) >= FEWEST_COUNTED // 2:
            checks.append(_pairs(f"the same position of two texts, {order} order", u[first], u[second]))
        checks += [_ks(f"{order} order, {name}", u[chosen]) for name, chosen in groups.items() if chosen.sum() >= FEWEST]
    return Battery(tuple(checks))


def _ks(name: str, u: Array) -> Check:
    from scipy.stats import kstest

    return Check(f"Kolmogorov–Smirnov, {name}", len(u), float(kstest(u, "uniform").pvalue))


def _chi_square(name: str, u: Array) -> Check:
    from scipy.stats import chisquare

    counts, _ = np.histogram(u, BINS, (0.0, 1.0))
    return Check(f"chi-square, {name}", len(u), float(chisquare(counts).pvalue))


def _pairs(name: str, first: Array, second: Array) -> Check:
    """Pairs, no number twice, in a grid whose cells are equally likely."""
    from scipy.stats import chisquare

    a, b = (np.minimum((u * PAIR_BINS).astype(int), PAIR_BINS - 1) for u in (first, second))
    counts = np.bincount(a * PAIR_BINS + b, minlength=PAIR_BINS**2)
    return Check(f"chi-square of {name}", len(first), float(chisquare(counts).pvalue))


def _at_lag(u: Array, lag: int) -> tuple[Array, Array]:
    """Each number beside the one `lag` after it.

    Across the ends of texts, too: whether a text ends depends on its last token, so pairing within texts would choose pairs
    by what is tested.
    """
    blocks = u[: len(u) // (2 * lag) * 2 * lag].reshape(-1, 2, lag)
    return blocks[:, 0].ravel(), blocks[:, 1].ravel()


def _apart(lag: int) -> str:
    return "neighbours" if lag == 1 else f"tokens {lag} apart"


def _same_positions(marks: Marks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where both the first and the second text of each two have a number at a position: indices of the two."""
    which, odd = marks.texts // 2 * (1 + marks.positions.max(initial=0)) + marks.positions, marks.texts % 2 == 1
    _, first, second = np.intersect1d(which[~odd], which[odd], return_indices=True)
    return np.flatnonzero(~odd)[first], np.flatnonzero(odd)[second]


def tokens_to_see(u: Array) -> float:
    """How many tokens show a fault nearly always, from the numbers that it would give in its own order.

    Kolmogorov–Smirnov rejects at level `REJECT`, divided by 80 tests, from √n · D = 2.7 on; 1.2 more is over two standard
    deviations. D is taken as 1/√len(u) less than it looks, since it looks larger by 0.9/√len(u) by chance. Infinite if
    nothing is left of it.
    """
    from scipy.stats import kstest

    distance = float(kstest(u, "uniform").statistic) - 1.0 / math.sqrt(len(u)) if len(u) else 0.0
    return float(math.ceil(((2.7 + 1.2) / distance) ** 2 / 100) * 100) if distance > 0 else math.inf


def ks_p(u: Array) -> float:
    """The p-value of one Kolmogorov–Smirnov test."""
    return _ks("", u).p if len(u) else 1.0
