"""`outrider train corpus`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from outrider.checks import check_count
from outrider.cli.shared_options import json_option


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder.")
@click.option("--characters", default=2_000_000, show_default=True, help="Of code, and of documentation, at most.")
@json_option
def corpus(output: Path, characters: int, as_json: bool) -> None:
    """Collect code and docstrings of the installed packages under permissive licences, and name those.

    Makes code.jsonl, docs.jsonl and licences.json in the folder.
    """
    from outrider.cli.models import click_status
    from outrider.train.packages import collect

    check_count("characters", characters)
    with click_status("Reading the installed packages …"):
        sizes = collect(output, characters)
    if as_json:
        click.echo(json.dumps({"characters": sizes, "output": str(output)}))
    else:
        click.echo(f"{sizes['code']:,} characters of code and {sizes['docs']:,} of documentation in {output}")
