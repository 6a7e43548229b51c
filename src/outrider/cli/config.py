"""`--config FILE`: options from a file, as `outrider tune --output` makes it. What the command line says goes before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from outrider.errors import ParameterError


def _use(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    del parameter
    if path is not None:
        from outrider.cli.sampling import parse_length
        from outrider.tune.configuration import read_configuration

        found = read_configuration(path)
        try:
            parse_length(found.get("num_draft_tokens", "auto"))
        except ParameterError as error:
            raise ParameterError(f"config {path}: {error}") from None
        context.default_map = {**(context.default_map or {}), **found}


def plain_asked(given: bool, *about_drafts: str) -> bool:
    """What --plain comes to: that of a configuration does not hold where the command line says something about drafts."""
    source = click.get_current_context().get_parameter_source
    if not given or source("plain") is ParameterSource.COMMANDLINE:
        return given
    return not any(source(name) is ParameterSource.COMMANDLINE for name in about_drafts)


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config, read before all other options."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_use,
        help="Options from a file, as outrider tune --output makes it.",
    )(command)
