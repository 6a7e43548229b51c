"""Options that many commands have, and how a group of options is added to a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]
Option = Callable[[Command], Command]

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
log_option = click.option("--log", type=click.Path(path_type=Path), help="Keep the runs here, and resume from it.")
prefix_cache_option = click.option(
    "--prefix-cache",
    metavar="MIB",
    type=int,
    default=1024,
    show_default=True,
    help="Memory of what texts began with, so that others that begin alike need not read it again; 0: none.",
)
_TEXT = (
    click.option("--stop", multiple=True, help="End before this text; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Do not end at end-of-sequence."),
    click.option("--chat/--raw", "chat", default=None, help="Use the chat template  [default: if the model has one]"),
)


def text_options(command: Command) -> Command:
    """Add how a text begins and ends: --stop, --ignore-eos and --chat/--raw."""
    return add_options(command, _TEXT)


def add_options(command: Command, options: Sequence[Option]) -> Command:
    """The command with these options, in its help in this order."""
    for option in reversed(options):
        command = option(command)
    return command
