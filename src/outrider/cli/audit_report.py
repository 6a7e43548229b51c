"""How an audit's outcome is shown: in a terminal, as JSON, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from outrider.audit.uniformity import Check
    from outrider.audit.verdict import Report
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel

_BARS = "▁▂▃▄▅▆▇█"
_ORDERS = {"ratio": "target/draft", "target": "target", "token": "token id"}
_SHOWN = 5  # impossible tokens


def show(report: Report) -> None:
    """Verdict, tests, histograms and what would have been seen."""
    from rich.table import Table

    from outrider.cli.output import wide_console

    colour = {"exact": "green", "not exact": "red"}.get(report.verdict, "yellow")
    console = wide_console()
    alpha = "" if report.alpha is None else f", alpha {report.alpha:.3f}"
    console.print(f"\n{report.setting}: {report.tokens} tokens in {report.texts} texts{alpha}")
    console.print(f"verdict: [bold {colour}]{report.verdict}[/] ({report.reason})")
    if report.p is not None:
        _show_tests(console, report)
    for text, position, token, gap in report.impossible[:_SHOWN]:
        console.print(
            f"  text {text + 1}, token {position}: {token} is {gap:.3g} below the best logit, outside the distribution"
        )
    if report.outside:
        console.print(
            f"{report.outside} tokens at the edge of their distribution, within the engine's rounding "
            f"({report.rounding:.2g})"
        )
    if report.run_over:
        console.print(
            f"{report.run_over} of {report.texts} texts go on behind an end-of-sequence token: a fault, unless the engine "
            "was told to ignore it; the verdict is about each token's distribution alone"
        )
    if not report.sights:
        return
    table = Table("a fault", "changed", "p would be", "shown by", title="What this sample would have shown")
    for sight in report.sights:
        needed = "—" if sight.needed == float("inf") else f"{sight.needed:,.0f}"
        mark = "" if sight.seen else "  not seen"
        table.add_row(sight.fault, f"{100 * sight.changed:.1f} %", f"{sight.p:.1e}{mark}", needed)
    console.print(table)
    if not all(sight.seen for sight in report.sights):
        from outrider.audit.uniformity import REJECT

        console.print(
            f'"not seen": p is not below {REJECT / 100:.0e}, a hundredth of what rejects: another sample might miss it'
        )


def _show_tests(console: Any, report: Report) -> None:
    from rich.table import Table

    from outrider.audit.uniformity import REJECT

    table = Table("in order of", "K–S", "chi-square", "pairs", "places, bonus", title="p-values, and the transform")
    table.add_column("histogram", no_wrap=True)
    for order, counts in report.histograms.items():
        own = [check for check in report.checks if f" {order} order" in check.name]
        parts = [check for check in own if "place " in check.name or "bonus" in check.name]
        pairs = [check for check in own if "chi-square of" in check.name]
        cells = [_p(own, "Kolmogorov"), _p(own, "chi-square,"), _least(pairs), _least(parts)]
        table.add_row(_ORDERS[order], *cells, _bars(counts))
    console.print(table)
    if not report.checks:
        console.print("no test has run: there is too little text for any")
        return
    console.print(
        f"p = {report.p:.2g} for all {report.tests} tests together (Bonferroni); an exact sampler is called not exact "
        f"once in {1 / REJECT:,.0f} audits"
    )


def _p(checks: list[Check], kind: str) -> str:
    return next((f"{check.p:.2g}" for check in checks if kind in check.name), "—")


def _least(checks: list[Check]) -> str:
    return f"≥ {min(check.p for check in checks):.2g}" if checks else "—"


def _bars(counts: list[int]) -> str:
    """Twenty bars on a scale from 0 to twice the mean."""
    mean = sum(counts) / len(counts) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(len(_BARS) * count / (2 * mean)))] for count in counts)


def as_object(reports: list[Report], model: TextModel, drafter: Drafter | None) -> dict[str, Any]:
    """All reports for machines; the verdict is the worst."""
    order = ("not exact", "could not tell", "exact")
    return {
        "target": model.name,
        "dtype": model.dtype_name,
        "draft": drafter.name if drafter is not None else None,
        "verdict": min((report.verdict for report in reports), key=order.index),
        "audits": [report.to_dict() for report in reports],
    }


def draw(reports: list[Report], path: Path) -> None:
    """The histograms of the transform, an SVG or any format that matplotlib knows by the file's name."""
    from outrider.audit.plot import plot_histograms

    plot_histograms(reports, path)
    click.echo(f"outrider: wrote {path}", err=True)
