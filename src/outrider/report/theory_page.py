"""The closed forms as pages: figures with their data folded away, and the printed numbers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.report.page import DataTable, Page, Section, cell
from outrider.report.pictures import Picture
from outrider.report.plots import draw
from outrider.theory.figure_data import FigureData, Panel
from outrider.theory.printed import MEANING, Row, Table


def svg_of(figure: FigureData | Picture) -> str:
    """The drawn figure."""
    return figure.svg() if isinstance(figure, Picture) else draw(figure)


def figures_page(figures: Sequence[FigureData | Picture], drawn: Mapping[str, str]) -> Page:
    """All figures. drawn: their SVG by name."""
    lead = (
        "What the formulas of Leviathan et al. 2022 and Chen et al. 2023 say, without running a model. α is the acceptance "
        "rate, γ (Chen: K) the draft length, c the time of a draft step relative to a target step, ĉ the same in "
        "operations.",
        "All of it takes acceptances as independent and alike, and a target pass as costing the same for any number of "
        "tokens, except where a figure is about that.",
    )
    sections = [_figure(figure, drawn[figure.name]) for figure in figures]
    return Page("Speculative decoding: the closed forms", lead, sections, "outrider theory figures")


def _figure(figure: FigureData | Picture, svg: str) -> Section:
    panels = figure.panels if isinstance(figure, FigureData) else ()
    folded = [(f"Data: {panel.y_label}", _points(panel)) for panel in panels]
    return Section(figure.name, figure.title, figure.source, [figure.text], svg, folded=folded)


def _points(panel: Panel) -> DataTable:
    """One row for each x, one column for each curve."""
    places = sorted({x for curve in panel.curves for x in curve.x})
    columns = [dict(zip(curve.x, curve.y, strict=True)) for curve in panel.curves]
    rows = [[cell(x), *(cell(column.get(x)) for column in columns)] for x in places]
    names = [panel.x_label, *(curve.label for curve in panel.curves)]
    return DataTable(names, rows, frozenset(range(len(names))))


def tables_page(tables: Sequence[Table]) -> Page:
    """The printed numbers beside ours; rows that are not ours are marked."""
    lead = (
        "Every number that a closed form gives, as the papers and the notes printed it, beside ours; measured values, where "
        "a source has them, are shown and not compared.",
        "How theirs was made of ours: " + "; ".join(f"{name}: {meaning}" for name, meaning in MEANING.items()) + ".",
    )
    return Page(
        "Speculative decoding: printed numbers, recomputed", lead, [_table(t) for t in tables], "outrider theory tables"
    )


def _table(table: Table) -> Section:
    inputs = list(dict.fromkeys(name for row in table.rows for name in row.given))
    measured = any(row.measured for row in table.rows)
    columns = [*inputs, "quantity", "ours", "theirs", "difference", "verdict", *(["measured"] if measured else [])]
    numbers = range(len(inputs) + 1, len(inputs) + 4)
    rows = [_cells(row, inputs, measured) for row in table.rows]
    marked = frozenset(
        i for i, row in enumerate(table.rows) if row.verdict in ("differs", "inputs rounded", "floating point")
    )
    shown = DataTable(columns, rows, frozenset(numbers), marked)
    text = [table.summary() + ".", *([table.note] if table.note else [])]
    return Section(table.name, table.title, table.source, text, table=shown)


def _cells(row: Row, inputs: Sequence[str], measured: bool) -> list[str]:
    numbers = [f"{row.ours:.5f}", row.theirs, f"{row.difference:+.5f}"]
    given = [row.given.get(name, "") for name in inputs]
    return [*given, row.quantity, *numbers, row.verdict, *([row.measured or ""] if measured else [])]
