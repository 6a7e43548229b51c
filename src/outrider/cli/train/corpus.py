"""`outrider train corpus`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from outrider.cli.files import check_new_folder
from outrider.cli.shared_options import json_option
from outrider.errors import ParameterError
from outrider.support.checks import check_count


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder.")
@click.option(
    "--characters",
    default=2_000_000,
    show_default=True,
    help="Of code, and of documentation; the last text of each is not cut.",
)
@json_option
def corpus(output: Path, characters: int, as_json: bool) -> None:
    """Collect code and docstrings of the installed packages under permissive licences, and name those.

    Makes code.jsonl, docs.jsonl and licences.json in the folder.
    """
    from outrider.cli.models import click_status
    from outrider.train.packages import collect

    check_count("characters", characters)
    check_new_folder(output)
    made = [name for name in ("code.jsonl", "docs.jsonl", "licences.json") if (output / name).exists()]
    if made:
        raise ParameterError(f"output {output} has {', '.join(made)} already: name another folder, or delete them")
    with click_status("Reading the installed packages …"):
        sizes = collect(output, characters)
    if as_json:
        click.echo(json.dumps({"characters": sizes, "output": str(output)}))
    else:
        click.echo(f"{sizes['code']:,} characters of code and {sizes['docs']:,} of documentation in {output}")
