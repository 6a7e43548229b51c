"""The entry point: commands, and errors as one line on standard error."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import click

import outrider
from outrider.cli.audit import audit
from outrider.cli.batch import batch
from outrider.cli.bench import bench
from outrider.cli.calibrate import calibrate
from outrider.cli.demo import demo
from outrider.cli.generate import generate
from outrider.cli.room import what_lacks
from outrider.cli.serve import serve
from outrider.cli.theory import theory
from outrider.cli.train import train
from outrider.cli.train_ngram import train_ngram
from outrider.cli.tune import tune
from outrider.errors import Interrupted, OutriderError
from outrider.support.garbage import collector
from outrider.support.memory import ask_for_huge_pages, keep_freed_memory

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(outrider.__version__, prog_name="outrider")
def cli() -> None:
    """Lossless speculative decoding: a cheap draft proposes tokens, the target verifies them and keeps its distribution."""


for command in (generate, demo, serve, batch, tune, audit, theory, bench, calibrate, train, train_ngram):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    if sys.stdout is None:
        _say("outrider: the output can't be written (standard output is closed): redirect it to /dev/null to drop it")
        sys.exit(1)
    keep_freed_memory()
    ask_for_huge_pages()
    collector.start()
    code = run(arguments)
    collector.end()
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; → the exit code."""
    logging.basicConfig(level=logging.WARNING, format="outrider: %(message)s")
    # huggingface_hub tells each retry, twice; what came of it is said below. It sets its own level when it is imported.
    for variable in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        os.environ.setdefault(variable, "error")
    try:
        code = cli.main(args=arguments, prog_name="outrider", standalone_mode=False)
    except click.ClickException as error:
        said = error.format_message()
        _say(said if isinstance(error, click.exceptions.NoArgsIsHelpError) else f"outrider: {' '.join(said.split())}")
        return 2
    except OutriderError as error:
        _say(f"outrider: {error}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        told = error.__cause__ if isinstance(error, click.Abort) else error  # click makes one of the other
        _say(f"outrider: interrupted{f'; {told}' if isinstance(told, Interrupted) else ''}")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`): nothing to say, and nothing more may be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError, RuntimeError) as error:
        lacking = what_lacks(error)
        if lacking is None:
            raise
        _say(f"outrider: {lacking}")
        return 1
    return code if isinstance(code, int) else 0


def _say(message: str) -> None:
    """One line on standard error, from one process of a job of torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("RANK", "0") == "0":
        click.echo(message, err=True)
