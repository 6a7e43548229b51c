"""`outrider train texts`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from outrider.cli.files import check_file
from outrider.cli.models import ModelChoice, model_options_without_draft
from outrider.cli.shared_options import json_option
from outrider.errors import Interrupted


@click.command("texts")
@model_options_without_draft
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="JSON lines; continued if they exist.")
@click.option("--count", default=1000, show_default=True, help="Texts to write.")
@click.option("--prompts", type=click.Path(path_type=Path), help="A prompt a line; the target asks itself if not given.")
@click.option(
    "--temperature",
    multiple=True,
    type=float,
    default=(1.0, 0.0),
    show_default=True,
    help="0 or more; may be given several times, and they take turns.",
)
@click.option("--max-new-tokens", default=256, show_default=True, help="Tokens of an answer at most.")
@click.option("--batch-size", default=16, show_default=True, help="Texts decoded side by side.")
@click.option("--seed", default=0, show_default=True)
@json_option
def texts(
    models: ModelChoice,
    output: Path,
    count: int,
    prompts: Path | None,
    temperature: tuple[float, ...],
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    as_json: bool,
) -> None:
    """Have the target write texts to train its draft on.

    Interrupted, it goes on where it stopped when it is started again with the same options.
    """
    from rich.console import Console
    from rich.progress import Progress

    from outrider.request.prompt_file import read_texts
    from outrider.support.run_log import RunLog
    from outrider.train.states import digest
    from outrider.train.texts import TextSettings, check_asks_itself, write_texts

    check_file(output)
    settings = TextSettings(count, temperature, max_new_tokens, batch_size, seed)
    asked = read_texts(prompts) if prompts else None
    models.refuse_compile("writing texts")
    target = models.load_target()
    about = {"texts by": target.name, "dtype": target.dtype_name, "temperatures": list(temperature), "seed": seed}
    about |= {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "prompts": digest(asked) if asked else None}
    if asked is None:
        check_asks_itself(target)
    log = RunLog(output, about, "give another --output, or delete it")
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("Writing texts", total=count, completed=len(log.entries))
        try:
            for done in write_texts(target, asked, settings, log):
                progress.update(task, completed=done)
        except KeyboardInterrupt:
            raise Interrupted(f"{len(log.entries)} of {count} texts are kept: the same command goes on") from None
    tokens = sum(len(entry["tokens"]) for entry in log.entries)
    if as_json:
        click.echo(json.dumps({**about, "texts": len(log.entries), "tokens": tokens, "output": str(output)}))
    else:
        click.echo(f"{len(log.entries)} texts, {tokens:,} tokens in {output}")
