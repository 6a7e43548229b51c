"""The entry point: commands, and errors as one line on standard error."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import click

import outrider
from outrider.cli.bench import bench
from outrider.cli.calibrate import calibrate
from outrider.cli.demo import demo
from outrider.cli.generate import generate
from outrider.cli.train_ngram import train_ngram
from outrider.errors import OutriderError

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(outrider.__version__, prog_name="outrider")
def cli() -> None:
    """Lossless speculative decoding: a cheap draft rides ahead, the target's distribution is kept."""


for command in (generate, demo, calibrate, train_ngram, bench):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; → the exit code."""
    logging.basicConfig(level=logging.WARNING, format="outrider: %(message)s")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = cli.main(args=arguments, prog_name="outrider", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        click.echo(f"outrider: {' '.join(error.format_message().split())}", err=True)
        return 2
    except OutriderError as error:
        click.echo(f"outrider: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("outrider: interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing to say, and nothing more may be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0
