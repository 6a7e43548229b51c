"""`--json-schema` and `--regex`, for the commands that write texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.shared_options import Command, add_options
from outrider.errors import ParameterError, why_unread

if TYPE_CHECKING:
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

    structure = Structure(None if path is None else _read(path), pattern)
    structure.check()
    return structure


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"json-schema {path} can't be read ({why_unread(error)}): name a JSON file") from None
