"""The picture of an audit: histograms of the transform, flat if the sampler is exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.audit.verdict import Report
from outrider.errors import ParameterError, why_unread
from outrider.support.optional import optional

NAMES = {"ratio": "by target / draft", "target": "by target probability", "token": "by token id"}


def plot_histograms(reports: Sequence[Report], path: Path) -> None:
    """A row for each report, a column for each order; the band holds 99.9 % of an exact sampler's bars."""
    figure_class = optional("matplotlib.figure", "a plot").Figure
    from scipy.stats import binom

    shown = [report for report in reports if report.histograms]
    if not shown:
        raise ParameterError("plot must be of a temperature above 0: a greedy distribution has no histogram")
    columns = max(len(report.histograms) for report in shown)
    figure = figure_class(figsize=(3.6 * columns, 2.6 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), columns, squeeze=False)
    for row, report in zip(axes, shown, strict=True):
        for axis, (order, counts) in zip(row, report.histograms.items(), strict=False):
            total, bins = sum(counts), len(counts)
            low, high = (binom.ppf(edge, total, 1 / bins) / total * bins for edge in (0.0005, 0.9995))
            axis.axhspan(low, high, color="#0072b2", alpha=0.15, lw=0)
            axis.bar(
                [(i + 0.5) / bins for i in range(bins)], [c / total * bins for c in counts], 0.9 / bins, color="#0072b2"
            )
            axis.set(xlim=(0, 1), title=NAMES[order], xlabel="u")
        row[0].set_ylabel(f"{report.setting}\n{report.verdict}")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ParameterError(f"plot {path} can't be written ({why_unread(error)}): name a .svg or .png file") from None
