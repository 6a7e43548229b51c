"""`--json-schema` and `--regex`, for the commands that write texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.shared_options import Command, add_options
from outrider.errors import ParameterError, why_unread

if TYPE_CHECKING:
    from outrider.models.base import TextModel
    from outrider.results import Result
    from outrider.structured import Structure

_OPTIONS = (
    click.option("--json-schema", type=click.Path(path_type=Path), metavar="FILE", help="Answer with JSON of this schema."),
    click.option(
        "--regex",
        metavar="PATTERN",
        help="Answer with text that matches this regular expression; beside a schema both hold.",
    ),
)


def structure_options(command: Command) -> Command:
    """Add --json-schema and --regex."""
    return add_options(command, _OPTIONS)


def take_structure(given: dict[str, Any]) -> Structure | None:
    """What these options ask for, taken out of `given` and checked; None without them."""
    path, pattern = given.pop("json_schema"), given.pop("regex")
    if path is None and pattern is None:
        return None
    from outrider.structured import Structure

    Structure().check(given["ignore_eos"])
    structure = Structure(None if path is None else _read(path), pattern)
    if path is not None:
        try:
            replace(structure, regex=None).check()
        except ParameterError as error:
            raise ParameterError(f"json-schema file {path}: {error}") from None
    structure.check()
    return structure


def told_if_cut(structure: Structure | None, model: TextModel, result: Result, limit: str) -> None:
    """Say that an answer ends before it is what was asked for. limit: the option that cut it."""
    limited = result.finish_reason in ("length", "context")
    if structure is not None and limited and not structure.complete(model, result.tokens):
        remedy = f"give a larger {limit}" if result.finish_reason == "length" else "the context is full"
        what = "JSON of the schema" if structure.json_schema is not None else "a match of the regex"
        click.echo(
            f"outrider: the answer was cut after {len(result.tokens)} tokens and is not yet {what}: {remedy}", err=True
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"json-schema {path} can't be read ({why_unread(error)}): name a JSON file") from None
