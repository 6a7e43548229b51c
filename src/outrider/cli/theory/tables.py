"""`outrider theory tables`: the numbers that the papers and the notes printed, each beside ours."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.files import as_csv, check_folder, check_html, write
from outrider.cli.shared_options import json_option
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.theory.printed import Row, Table


@click.command()
@click.option(
    "--table",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this table; several times for several. A wrong name lists all.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html", help="Write the tables as a page, too."
)
@click.option("--csv", "csv_format", is_flag=True, help="Print comma-separated values.")
@json_option
def tables(names: tuple[str, ...], output: Path | None, csv_format: bool, as_json: bool) -> None:
    """Every closed-form number of the papers and the notes beside ours: difference, and how theirs was rounded."""
    from outrider.theory.printed import MEANING
    from outrider.theory.printed import tables as compute

    if csv_format and as_json:
        raise ParameterError("csv and json exclude each other: choose one")
    check_html(output)
    found = compute(names)
    if output is not None:
        check_folder(output.parent)
        from outrider.report.page import render
        from outrider.report.theory_page import tables_page

        write(output, render(tables_page(found)))
        click.echo(f"written: {output}", err=True)
    if as_json:
        click.echo(json.dumps({"tables": [_to_dict(table) for table in found], "meaning": MEANING}))
    elif csv_format:
        columns = ("table", "inputs", "quantity", "ours", "theirs", "difference", "verdict", "measured")
        click.echo(as_csv(columns, ((table.name, *_cells(row)) for table in found for row in table.rows)), nl=False)
    else:
        for table in found:
            _print(table)
        used = {row.verdict for table in found for row in table.rows}
        for verdict in (name for name in MEANING if name in used):
            click.echo(f"{verdict}: {MEANING[verdict]}")


def _to_dict(table: Table) -> dict[str, object]:
    rows = [{**asdict(row), "difference": row.difference, "verdict": row.verdict} for row in table.rows]
    about = {"name": table.name, "title": table.title, "source": table.source, "note": table.note}
    return {**about, "summary": table.summary(), "rows": rows}


def _cells(row: Row) -> tuple[object, ...]:
    inputs = " ".join(f"{name}={value}" for name, value in row.given.items())
    return inputs, row.quantity, row.ours, row.theirs, row.difference, row.verdict, row.measured


def _print(table: Table) -> None:
    click.echo(f"{table.name}: {table.title} ({table.source})")
    measured = any(row.measured for row in table.rows)
    lines = [["", "", "ours", "theirs", "difference", "", "measured" if measured else ""]]
    for row in table.rows:
        inputs = "  ".join(f"{name} {value}" for name, value in row.given.items())
        numbers = [f"{row.ours:.5f}", row.theirs, f"{row.difference:+.5f}"]
        lines.append([inputs, row.quantity, *numbers, row.verdict, row.measured or ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if i in (2, 3, 4) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo(("  " + "  ".join(cells)).rstrip())
    click.echo(f"  {table.summary()}")
    if table.note:
        click.echo(f"  {table.note}")
    click.echo()
