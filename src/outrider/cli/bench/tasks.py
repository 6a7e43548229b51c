"""`outrider bench tasks`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import about_runs, conclude, open_log, scored_options, tell, track
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.cli.ray import ray_options, told_of_ray
from outrider.errors import ParameterError
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.batch.ray_pool import Cluster
    from outrider.bench.answers import AnswerRun, Drafting, Plan, Row
    from outrider.bench.examples import Source
    from outrider.bench.quality import Metric
    from outrider.bench.settings import Setting
    from outrider.models.base import TextModel
    from outrider.support.run_log import RunLog


@click.command()
@model_options_with_one_draft
@scored_options
@click.option("--num-draft-tokens", multiple=True, type=int, help="Fixed draft lengths  [default: adaptive]")
@click.option("--max-new-tokens", type=int, help="Tokens of an answer at most  [default: 128; humaneval 512]")
@click.option("--samples", default=1, show_default=True, help="Answers to each prompt where the temperature is not 0.")
@click.option("--execute-generated-code", is_flag=True, help="humaneval: run what the model writes (no sandbox).")
@ray_options
def tasks(
    models: ModelChoice,
    source: Source,
    settings: list[Setting],
    log: Path | None,
    as_json: bool,
    num_draft_tokens: tuple[int, ...],
    max_new_tokens: int | None,
    samples: int,
    execute_generated_code: bool,
    cluster: Cluster | None,
) -> None:
    """The papers' tasks, plain and with each --draft on its own: quality, time per token, speed-up, acceptance.

    Leviathan Table 2, Chen Table 1. Quality has 95 % intervals, its difference to plain decoding a paired one. Chen's
    settings are --temperature 0.8 --top-p 0.95 --num-draft-tokens 4 for humaneval, --temperature 1 --top-p 0.8 for xsum.
    """
    from outrider.bench.examples import load_examples

    if max_new_tokens is not None:
        check_count("max_new_tokens", max_new_tokens)
    check_count("samples", samples)
    kind, examples = source.kind, load_examples(source)
    if source.scored_by == "pass@1" and source.name != "humaneval":
        raise ParameterError(f"metric pass@1 is for task humaneval, got task {source.name}")
    if execute_generated_code and source.scored_by != "pass@1":
        raise ParameterError(f"metric {source.scored_by} executes nothing: drop --execute-generated-code")
    from outrider.bench.quality import make_metric

    if source.scored_by == "pass@1":
        make_metric("pass@1", None, execute_generated_code)  # refused before any model is loaded
    from outrider.bench.answers import Plan, measure, summarise
    from outrider.bench.machine import machine

    plan = Plan(kind, examples, settings, max_new_tokens or kind.max_new_tokens, samples)
    target = models.load_target()
    metric = make_metric(source.scored_by, target, execute_generated_code)
    about = about_runs("tasks", target, source, plan.max_new_tokens)
    kept = open_log(log, about)
    draftings = _draftings(models, target, num_draft_tokens)
    if cluster is None:
        steps = measure(target, [one for one, _ in draftings], plan, metric, kept)
    else:
        steps = _spread(cluster, models, target, draftings, plan, metric, kept)
    runs = track(steps, "Answering", plan.count(len(draftings)))
    rows = summarise(runs, plan, target, metric)
    out = {**about, "prompts": len(examples), "samples": samples, "rows": [asdict(row) for row in rows], **machine()}
    conclude(log, out)
    heading = f"{target.name}, {target.dtype_name}: {source.task}, {len(examples)} prompts"
    tell(out, as_json, heading, lambda: _print(rows, metric))


def _draftings(models: ModelChoice, target: TextModel, lengths: tuple[int, ...]) -> list[tuple[Drafting, str | None]]:
    """Plain decoding, and each draft at each length, with what the command line says of it."""
    from outrider.bench.answers import PLAIN, Drafting
    from outrider.settings.drafting import MAX_DRAFT

    for one in lengths:
        check_count("num_draft_tokens", one, 1, MAX_DRAFT)
    found: list[tuple[Drafting, str | None]] = [(Drafting(PLAIN, None), None)]
    for spec in dict.fromkeys(models.draft):
        drafter = models.load_one_draft(spec, target)
        asked: list[int | None] = [*dict.fromkeys(lengths)]
        for length in asked or [None]:
            found.append((Drafting(f"{spec}, {'adaptive' if length is None else f'K = {length}'}", drafter, length), spec))
    return found


def _spread(
    cluster: Cluster,
    models: ModelChoice,
    target: TextModel,
    draftings: list[tuple[Drafting, str | None]],
    plan: Plan,
    metric: Metric | None,
    kept: RunLog,
) -> Iterator[AnswerRun]:
    from outrider.bench.answers_spread import measure_spread

    told_of_ray(cluster)
    setup = models.setup(draft=(), compile=models.compile)
    return measure_spread(cluster, setup, target, draftings, plan, metric, kept)


def _print(rows: list[Row], metric: Metric | None) -> None:
    from outrider.bench.quality import FEW_PROMPTS

    width = max(len(row.drafting) for row in rows)
    for setting in dict.fromkeys(row.setting for row in rows):
        click.echo(f"\n{setting}")
        quality = "" if metric is None else f"  {metric.name + ' (95 %)':>24s}  {'difference to plain':>24s}"
        click.echo(f"  {'draft':{width}s}{quality}  ms/token  {'speed-up (quartiles)':>22s}  alpha  tokens/round  identical")
        for row in (row for row in rows if row.setting == setting):
            click.echo(_line(row, metric, width))
            for name, parted in row.divergences.items():
                click.echo(f"    {name}: {parted}")
    if metric is not None and rows[0].prompts < FEW_PROMPTS:
        click.echo(f"\nintervals from {rows[0].prompts} prompts are too narrow: take {FEW_PROMPTS} or more")


def _line(row: Row, metric: Metric | None, width: int) -> str:
    quality = "" if metric is None else f"  {row.quality!s:>24s}  {row.against_plain or '—'!s:>24s}"
    speedup = "1" if row.speedup is None else str(row.speedup)
    alpha = "    —" if row.acceptance_rate is None else f"{row.acceptance_rate:5.2f}"
    same = "" if row.identical is None else f"{row.identical} of {row.prompts}"
    line = (
        f"  {row.drafting:{width}s}{quality}  {row.ms_per_token:8.2f}  {speedup:>22s}  {alpha}  {row.tokens_per_round:12.2f}"
    )
    return f"{line}  {same:>9s}".rstrip()
