"""`outrider bench beams`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import about_runs, drafted_lengths, open_log, prompt_options, tell, track
from outrider.cli.models import ModelChoice, model_options_without_draft
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.bench.beams import Row
    from outrider.bench.examples import Source


@click.command()
@model_options_without_draft
@click.option("--draft", multiple=True, required=True, metavar="MODEL", help="A model, or self; its beams are checked.")
@prompt_options
@click.option(
    "--num-beams",
    multiple=True,
    type=int,
    default=(2, 4),
    show_default=True,
    help="Widths to measure, 1 … 64; may be given several times.",
)
@click.option(
    "--num-draft-tokens", multiple=True, default=("1", "2", "4", "auto"), show_default=True, help="Steps drafted in a round."
)
@click.option("--max-new-tokens", default=64, show_default=True, help="Tokens of each text.")
def beams(
    models: ModelChoice,
    source: Source,
    log: Path | None,
    as_json: bool,
    num_beams: tuple[int, ...],
    num_draft_tokens: tuple[str, ...],
    max_new_tokens: int,
) -> None:
    """Speculative beam search beside plain beam search: passes, acceptance, tokens scored, speed-up. Leviathan A.4.

    The texts of both must agree; scores tell how near a tie they are where they do not.
    """
    from outrider.bench.examples import load_examples

    check_count("max_new_tokens", max_new_tokens)
    widths = _widths(num_beams)
    lengths = drafted_lengths(num_draft_tokens, ", ".join(num_draft_tokens), "plain search is always run")
    kind, examples = source.kind, load_examples(source)
    models.refuse_compile("beam search")
    target = models.load_target()
    from outrider.beam.draft import draft_model
    from outrider.bench.beams import measure, summarise
    from outrider.bench.machine import machine

    drafter = models.load_draft(target)
    drafter.bind(target)
    draft_model(drafter)
    about = about_runs("beams", target, source, max_new_tokens, models.draft)
    kept = open_log(log, about)
    steps = measure(target, drafter, kind, examples, widths, lengths, max_new_tokens, kept)
    rows = summarise(track(steps, "Searching", len(examples) * len(widths) * (1 + len(lengths))))
    out = {**about, "prompts": len(examples), "rows": [asdict(row) for row in rows], **machine()}
    heading = f"{target.name}, {target.dtype_name}, draft {drafter.name}: {source.task}, {len(examples)} prompts"
    tell(out, as_json, heading, lambda: _print(rows))


def _widths(given: tuple[int, ...]) -> list[int]:
    from outrider.settings.beams import BeamSettings

    return sorted({BeamSettings(count).num_beams for count in given})


def _print(rows: list[Row]) -> None:
    click.echo(
        "beams  drafted  steps/pass  accepted  scored/step  ms/step: draft   verify  speed-up               identical"
    )
    for row in rows:
        rate = "–" if row.acceptance is None else f"{row.acceptance:.2f}"
        draft, verify = 1000 * row.seconds["draft"], 1000 * row.seconds["verify"]
        cells = f"{row.width:5d}  {row.drafted:>7s}  {row.steps_per_pass:10.2f}  {rate:>8s}  {row.scored_per_step:11.1f}"
        same = f"{row.identical} of {row.prompts}, scores within {row.score_gap:.1g}"
        click.echo(f"{cells}  {draft:14.1f}  {verify:7.1f}  {row.speedup!s:21s}  {same}")
