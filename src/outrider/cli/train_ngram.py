"""`outrider train-ngram`: count an n-gram table from text files, for `--draft ngram:table=FILE`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.files import check_file, check_other_file
from outrider.cli.models import load_tokenizer
from outrider.cli.shared_options import json_option
from outrider.errors import ParameterError
from outrider.support.text_files import is_text, passed_over

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PIECE = 1 << 18  # characters tokenised at once
LONGEST_WORD = 4 * PIECE


@click.command("train-ngram")
@click.argument("corpus", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--target", metavar="MODEL", help="Whose tokenizer counts  [default: SmolLM2-135M-Instruct]")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The table's file.")
@click.option("--order", default=4, show_default=True, help="The longest n-gram, 1 … 8.")
@click.option("--min-count", default=2, show_default=True, help="Drop rarer followers of contexts of two tokens and more.")
@click.option("--followers", default=32, show_default=True, help="Followers kept per context.")
@json_option
def train_ngram(
    corpus: tuple[Path, ...], target: str | None, output: Path, order: int, min_count: int, followers: int, as_json: bool
) -> None:
    """Count n-grams in CORPUS…, text files and folders of them, with the target's tokenizer. Other files there are left out.

    Memory stays bounded whatever the size of the corpus; nothing is left behind if it is interrupted.
    """
    from rich.console import Console
    from rich.progress import Progress

    from outrider.models.compatibility import fingerprint_of
    from outrider.ngram.training import Settings, train

    check_file(output)
    settings = Settings(order, min_count, followers)
    files = list(_files(corpus))
    check_other_file("output", output, *files)
    tokenizer = load_tokenizer(target)
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("Counting", total=sum(file.stat().st_size for file in files))
        tokens = train(
            (_pieces(file, progress, task) for file in files),
            lambda pieces: tokenizer(pieces, add_special_tokens=False)["input_ids"],
            len(tokenizer),
            fingerprint_of(tokenizer),
            output,
            settings,
        )
    seconds, size = time.perf_counter() - start, output.stat().st_size
    about = {"tokens": tokens, "files": len(files), "bytes": size, "order": order, "seconds": seconds, "table": str(output)}
    if as_json:
        click.echo(json.dumps(about))
    else:
        click.echo(f"{tokens:,} tokens of {len(files)} files counted in {seconds:.0f} s; {output} has {size / 1e6:.1f} MB")
        click.echo(f"use it with --draft ngram:table={output}")


def _files(corpus: tuple[Path, ...]) -> Iterator[Path]:
    """The texts; what else lies in folders is passed over, and refused if it is named itself."""
    passed = 0
    for path in corpus:
        if path.is_dir():
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                if is_text(file):
                    yield file
                else:
                    passed += 1
        elif path.is_file():
            if not os.access(path, os.R_OK):
                raise ParameterError(f"corpus {path} can't be read: check its permissions")
            if not is_text(path):
                raise ParameterError(
                    f"corpus {path} must be text in UTF-8, and its beginning is not: leave it out, or convert it"
                )
            yield path
        else:
            raise ParameterError(f"corpus {path} does not exist: name text files or folders of them")
    if passed:
        click.echo(passed_over(passed), err=True)


def _pieces(path: Path, progress: Progress, task: TaskID) -> Iterator[str]:
    """A file's text in pieces that end with a line, where lines are so short; what is not UTF-8 is replaced."""
    rest = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while read := file.read(PIECE):
            text = rest + read
            end = _end_of_piece(text)
            rest = text[end:]
            if end:
                yield text[:end]
                progress.advance(task, len(text[:end].encode()))
    if rest:
        yield rest
        progress.advance(task, len(rest.encode()))


def _end_of_piece(text: str) -> int:
    """Where a text that goes on can be cut: after its last line, else before its last space, which belongs to the next word.

    0 for one that has neither and may have some soon; a word of several pieces is cut where it is.
    """
    return text.rfind("\n") + 1 or max(0, text.rfind(" ")) or (len(text) if len(text) >= LONGEST_WORD else 0)
