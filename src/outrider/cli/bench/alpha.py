"""`outrider bench alpha`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import about_runs, conclude, experiment_options, open_log, tell, track
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.bench.acceptance import Row
    from outrider.bench.examples import Source
    from outrider.bench.settings import Setting


@click.command()
@model_options_with_one_draft
@experiment_options
@click.option("--max-new-tokens", default=128, show_default=True, help="Tokens of each text at most.")
def alpha(
    models: ModelChoice, source: Source, settings: list[Setting], log: Path | None, as_json: bool, max_new_tokens: int
) -> None:
    """The acceptance rate alpha of each --draft on its own, position by position on the target's own texts.

    Leviathan Table 3, where 10,000 tokens were read: models gave 0.5 to 0.9, bigrams about 0.2, and the sharper the law the
    higher. Give --draft several times; unigrams and bigrams are ngram:table=FILE,order=1 and order=2. "By position" is what
    --drafter-invariant accepts.
    """
    from outrider.bench.examples import load_examples

    check_count("max_new_tokens", max_new_tokens)
    kind, examples = source.kind, load_examples(source)
    models.refuse_compile("reading texts")
    target = models.load_target()
    from outrider.bench.acceptance import measure, summarise, texts_of
    from outrider.bench.machine import machine

    about = about_runs("alpha", target, source, max_new_tokens)
    kept = open_log(log, about)
    drafts = {spec: models.load_one_draft(spec, target) for spec in dict.fromkeys(models.draft)}
    steps = measure(target, drafts, kind, examples, settings, max_new_tokens, kept)
    texts = sum(len(texts_of(examples, setting)) for setting in settings)
    rows = summarise(track(steps, "Reading", texts * (1 + len(drafts))))
    out = {**about, "prompts": len(examples), "rows": [asdict(row) for row in rows], **machine()}
    conclude(log, out)
    heading = f"{target.name}, {target.dtype_name}: {source.task}, {len(examples)} texts"
    tell(out, as_json, heading, lambda: _print(rows, len(examples)))


def _print(rows: list[Row], texts: int) -> None:
    from outrider.bench.quality import FEW_PROMPTS

    width = max(len(row.draft) for row in rows)
    click.echo(f"{'draft':{width}s} {'setting':24s}  {'alpha (95 %)':>24s}  by position  sd of beta  offered  tokens")
    for row in rows:
        raced = f"{row.by_position.value:11.3f}" if row.by_position is not None else f"{'—':>11s}"
        cells = f"{row.alpha!s:>24s}  {raced}  {row.deviation:10.3f}  {row.offered:7.0%}  {row.tokens:6d}"
        click.echo(f"{row.draft:{width}s} {row.setting:24.24s}  {cells}")
    if texts < FEW_PROMPTS:
        click.echo(f"intervals from {texts} texts are too narrow: take {FEW_PROMPTS} or more")
