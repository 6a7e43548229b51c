"""`--config FILE`: options from a file, as `outrider tune --write` makes it. What the command line says goes before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def _use(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    del parameter
    if path is not None:
        from outrider.tune.configuration import read_configuration

        context.default_map = {**(context.default_map or {}), **read_configuration(path)}


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config, read before all other options."""
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_use,
        help="Options from a file, as outrider tune --write makes it.",
    )(command)
