"""`outrider theory figures`: the papers' figures and more, drawn from the closed forms, with their data."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.files import as_csv, check_folder, folder, write
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.report.pictures import Picture
    from outrider.theory.figure_data import FigureData

DEFAULT = Path("outrider-theory.html")
COLUMNS = ("figure", "panel", "curve", "x", "y")


@click.command()
@click.option(
    "--figure",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this figure; several times for several. A wrong name lists all.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html|FOLDER",
    help="A page with all figures, or a folder for NAME.svg and NAME.csv  [default: outrider-theory.html]",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["svg", "csv"]),
    help="What to put into a folder  [default: both]",
)
@click.option(
    "--csv", "csv_format", is_flag=True, help="Print the data as comma-separated values; draws only with --output."
)
@click.option("--json", "as_json", is_flag=True, help="Print the data as one JSON object; draws only with --output.")
def figures(names: tuple[str, ...], output: Path | None, formats: tuple[str, ...], csv_format: bool, as_json: bool) -> None:
    """Leviathan's Figures 2 to 4, the oracle, Chen's trade-off, the limits, other rules; and pictures of a round.

    Needs matplotlib (the extra `report`) where something is drawn.
    """
    if csv_format and as_json:
        raise ParameterError("csv and json exclude each other: choose one")
    if output is not None and output.suffix not in ("", ".html"):
        raise ParameterError(f"output must be a folder, or a file that ends in .html, got {output}")
    if formats and (output or DEFAULT).suffix == ".html":
        raise ParameterError("format is for folders: give --output FOLDER")
    chosen = _choose(names)
    written: list[Path] = []
    if output is not None or not (as_json or csv_format):
        written = _draw(chosen, output or DEFAULT, formats or ("svg", "csv"))
        click.echo(f"written: {', '.join(map(str, written))}", err=as_json or csv_format)
    if as_json:
        click.echo(json.dumps({"figures": [figure.to_dict() for figure in chosen], "written": list(map(str, written))}))
    elif csv_format:
        click.echo(_csv(chosen), nl=False)


def _choose(names: Sequence[str]) -> list[FigureData | Picture]:
    """The figures and pictures with these names, in the order asked for; all for none."""
    from outrider.report.pictures import pictures
    from outrider.support.checks import check_choice
    from outrider.theory.curves import MAKERS

    drawn = pictures()
    every = [*drawn, *MAKERS]
    chosen = [check_choice("figure", name, every) for name in names or every]
    return [drawn[name] if name in drawn else MAKERS[name]() for name in chosen]


def _draw(chosen: Sequence[FigureData | Picture], out: Path, formats: Sequence[str]) -> list[Path]:
    """Draw everything, then write it: an interruption leaves nothing half done. → the files"""
    from rich.console import Console
    from rich.progress import track

    from outrider.report.page import render
    from outrider.report.plots import matplotlib_or_error, standalone
    from outrider.report.theory_page import figures_page, svg_of

    page = out.suffix == ".html"
    check_folder(out.parent) if page else folder(out)
    wanted = chosen if page or "svg" in formats else []
    if wanted:
        matplotlib_or_error()  # before there is a bar
    steps = track(wanted, "Drawing", console=Console(stderr=True), disable=not sys.stderr.isatty())
    drawn = {figure.name: svg_of(figure) for figure in steps}
    if page:
        write(out, render(figures_page(chosen, drawn)))
        return [out]
    files = {f"{figure.name}.svg": standalone(drawn[figure.name], figure.digest()) for figure in wanted}
    if "csv" in formats:
        files |= {f"{figure.name}.csv": _csv([figure]) for figure in chosen if next(figure.rows(), None)}
    for name, text in files.items():
        write(out / name, text)
    return [out / name for name in files]


def _csv(chosen: Sequence[FigureData | Picture]) -> str:
    """Every point of every curve; the pictures of a round have none."""
    return as_csv(COLUMNS, (row for figure in chosen for row in figure.rows()))
