"""`outrider bench report`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from outrider.cli.files import check_folder, check_html, write
from outrider.errors import ParameterError

DEFAULT = Path("outrider-report.html")


@click.command()
@click.argument("logs", nargs=-1, metavar="LOG…", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE.html", help=f"The page  [default: {DEFAULT}]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object; draws only with --output.")
def report(logs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """One self-contained page of what was measured, beside the papers' tables and figures.

    LOG: of bench sweep, tasks, alpha or toyllm, any of them, each with the LOG.result.json that its command left beside it;
    or what these printed with --json. What was not measured is named, with the command that measures it. Loads no model.
    """
    from outrider.report.measured import page
    from outrider.report.measured_logs import missing, read
    from outrider.report.page import render

    check_html(output)
    measured = read(logs)
    place = output or (None if as_json else DEFAULT)
    if place is not None:
        check_folder(place.parent)
        try:
            made = render(page(measured))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            names = ", ".join(str(one.path) for one in measured)
            raise ParameterError(
                f"a report can't be made of {names}: something is missing or of another kind ({error!r}); were the logs "
                "written by this version's commands, and not changed since?"
            ) from error
        write(place, made)
        click.echo(f"written: {place}", err=as_json)
    gaps = missing(measured)
    if as_json:
        found = [{"log": str(one.path), "runs": len(one.runs), "figures": one.found} for one in measured]
        click.echo(json.dumps({"measured": found, "missing": gaps, "written": None if place is None else str(place)}))
    for kind, command in gaps.items():
        click.echo(f"not measured: {kind}: {command}", err=True)
