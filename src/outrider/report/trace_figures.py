"""The figures of a trace: beta along the text, its histogram, acceptance by position in the draft. Geometry in SVG units.

A token is accepted with probability beta = sum min(target, draft) (Leviathan 3.1), so in each bar of the histogram the
accepted share should be near the beta on the axis, and the accepted tokens as many as the betas add up to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from outrider.records import Round, acceptance_by_position

STRIP_WIDTH, STRIP_HEIGHT = 900.0, 110.0
CHART_WIDTH, CHART_HEIGHT = 380.0, 150.0
BINS = 10
SMOOTH = 20  # tested positions on either side of a point of the mean
MOST_POSITIONS = 16
DOT = 2.6


@dataclass(frozen=True)
class Strip:
    """Beta at every tested position along the text. accepted, rejected, mean: paths; ticks: (x, token number)."""

    accepted: str
    rejected: str
    mean: str
    ticks: tuple[tuple[float, int], ...]
    average: float
    tested: int
    kept: int
    one_hot: bool

    @property
    def expected(self) -> float:
        """Accepted tokens by the sum of the betas."""
        return self.average * self.tested


@dataclass(frozen=True)
class Bar:
    """A column of a chart: where, how high the whole and its accepted part are, and the numbers behind it.

    label, below: under the axis; above: over the column.
    """

    x: float
    width: float
    whole: float
    part: float
    label: str
    below: str
    above: str
    of: int
    accepted: int


def beta_strip(rounds: Sequence[Round]) -> Strip | None:
    """None where no betas were recorded."""
    points: list[tuple[float, float, bool]] = []
    at, tokens = 0, sum(len(r.tokens) for r in rounds)
    for record in rounds:
        for i in range(record.tested if record.betas else 0):
            assert record.betas is not None
            points.append((STRIP_WIDTH * (at + i + 0.5) / tokens, record.betas[i], i < record.accepted))
        at += len(record.tokens)
    if not points:
        return None
    dots = "".join(f"M{x:.1f} {_y(b):.1f}h0" for x, b, accepted in points if accepted)
    crosses = "".join(_cross(x, _y(b)) for x, b, accepted in points if not accepted)
    betas = [b for _, b, _ in points]
    kept = sum(accepted for *_, accepted in points)
    return Strip(dots, crosses, _mean(points), _ticks(tokens), fmean(betas), len(points), kept, set(betas) <= {0.0, 1.0})


def _y(beta: float) -> float:
    return STRIP_HEIGHT * (1.0 - min(1.0, max(0.0, beta)))


def _cross(x: float, y: float) -> str:
    return f"M{x - DOT:.1f} {y - DOT:.1f}l{2 * DOT:g} {2 * DOT:g}m0 {-2 * DOT:g}l{-2 * DOT:g} {2 * DOT:g}"


def _mean(points: Sequence[tuple[float, float, bool]]) -> str:
    """The moving mean as a path."""
    if len(points) < SMOOTH:
        return ""
    means = []
    for i, (x, *_) in enumerate(points):
        near = [b for _, b, _ in points[max(0, i - SMOOTH) : i + SMOOTH + 1]]
        means.append(f"{x:.1f} {_y(fmean(near)):.1f}")
    return "M" + "L".join(means)


def _ticks(tokens: int) -> tuple[tuple[float, int], ...]:
    step = next(n * 10**k for k in range(12) for n in (1, 2, 5) if tokens / (n * 10**k) <= 12)
    return tuple((STRIP_WIDTH * n / tokens, n) for n in range(0, tokens + 1, step))


def beta_histogram(rounds: Sequence[Round]) -> list[Bar]:
    """Tested positions by beta, in tenths; empty where no betas were recorded."""
    of, accepted = [0] * BINS, [0] * BINS
    for record in rounds:
        for i, beta in enumerate((record.betas or ())[: record.tested]):
            at = min(BINS - 1, max(0, int(beta * BINS)))
            of[at] += 1
            accepted[at] += i < record.accepted
    most = max(of)
    if not most:
        return []
    wholes = [CHART_HEIGHT * n / most for n in of]
    return [
        _bar(i, BINS, whole, (of[i], accepted[i]), (f"{(i + 0.5) / BINS:.2f}", "", str(of[i]) if of[i] else ""))
        for i, whole in enumerate(wholes)
    ]


def acceptance_chart(rounds: Sequence[Round]) -> list[Bar]:
    """Accepted of tested at each position in the draft; positions that were never tested are left out."""
    counts = [(of, accepted) for of, accepted in acceptance_by_position(rounds) if of][:MOST_POSITIONS]
    return [
        _bar(i, len(counts), CHART_HEIGHT, (of, accepted), (str(i + 1), str(of), f"{accepted / of:.2f}"))
        for i, (of, accepted) in enumerate(counts)
    ]


def _bar(i: int, count: int, whole: float, numbers: tuple[int, int], texts: tuple[str, str, str]) -> Bar:
    """The i-th of `count` columns. numbers: tested, accepted; texts: label, below, above."""
    of, accepted = numbers
    step = CHART_WIDTH / max(count, 8)
    gap = min(6.0, step / 5)
    return Bar(i * step + gap / 2, step - gap, whole, whole * accepted / of if of else 0.0, *texts, of, accepted)
