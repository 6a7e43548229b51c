"""--top-k, --top-p and --min-p, the same for every command that samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option("--top-k", type=int, default=0, help="0: no limit."),
    click.option("--top-p", type=float, default=1.0, help="1: no limit."),
    click.option("--min-p", type=float, default=0.0, help="0: no limit."),
)


def truncation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add them; the command gets top_k, top_p and min_p."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
