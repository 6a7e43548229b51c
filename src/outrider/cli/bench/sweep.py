"""`outrider bench sweep`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import about_runs, conclude, experiment_options, open_log, tell, track
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.errors import ParameterError
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.bench.examples import Source
    from outrider.bench.settings import Setting
    from outrider.bench.sweep_summary import LengthRow, Sweep


@click.command()
@model_options_with_one_draft
@experiment_options
@click.option("--lengths", default="0-7", show_default=True, metavar="FIRST-LAST", help="Draft lengths K; 0 is added.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Tokens of each text.")
def sweep(
    models: ModelChoice,
    source: Source,
    settings: list[Setting],
    log: Path | None,
    as_json: bool,
    lengths: str,
    max_new_tokens: int,
) -> None:
    """Time per token, acceptance and the length of a round for K = 0 … 7, measured beside predicted.

    Chen Figure 1, Leviathan Table 4. At temperature 0 the texts of all K must agree; where they differ it is said why.
    """
    from outrider.bench.examples import load_examples

    check_count("max_new_tokens", max_new_tokens)
    asked, kind, examples = _lengths(lengths), source.kind, load_examples(source)
    target = models.load_target()
    from outrider.bench.asking import asked_of
    from outrider.bench.machine import machine
    from outrider.bench.sweep import measure
    from outrider.bench.sweep_summary import Tables, summarise, tables_of
    from outrider.costs import measured_costs

    draft = models.load_draft(target)
    about = about_runs("sweep", target, source, max_new_tokens, models.draft)
    kept = open_log(log, about)
    steps = measure(target, draft, kind, examples, settings, asked, max_new_tokens, kept)
    runs = track(steps, "Sweeping", len(examples) * len(settings) * len(asked))
    draft.bind(target)
    draft.measure()
    standing = Tables(measured_costs(target), draft.part_seconds(), draft.seconds)
    tables = tables_of(runs, standing)
    prompts = {(one.name, one.digest): asked_of(target, kind, one) for one in examples}
    found = summarise(runs, settings, standing, prompts, target)
    costs = {n: tables.costs.verify(n) for n in tables.costs.verify_seconds}
    out = {**about, "prompts": len(examples), "verify_seconds": costs, "change_seconds": tables.costs.change}
    out |= {
        "draft_seconds": {name: asdict(step) for name, step in tables.steps.items()},
        "sweeps": [asdict(one) for one in found],
        **machine(),
    }
    conclude(log, out)
    size = f"{len(examples)} × {max_new_tokens} tokens"
    heading = f"{target.name}, {target.dtype_name}, draft {draft.name}: {source.task}, {size}"
    tell(out, as_json, heading, lambda: _print(found, max_new_tokens))


def _lengths(text: str) -> list[int]:
    first, dash, last = text.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        low, high = 1, 0
    if not 0 <= low <= high <= 64:
        raise ParameterError(f"lengths must be K or FIRST-LAST within 0 … 64, got {text!r}: for example 0-7")
    return sorted({0, *range(low, high + 1)})


def _print(sweeps: list[Sweep], tokens: int) -> None:
    for found in sweeps:
        _print_sweep(found, tokens)


def _print_sweep(found: Sweep, tokens: int) -> None:
    alpha = "—" if found.alpha is None else f"{found.alpha:.3f}"
    click.echo(f"\n{found.setting}: alpha {alpha}, c {found.c:.3f} by the cost tables")
    click.echo(
        "   K  ms/token ± sd    speed-up (quartiles)  alpha  tokens/round  /(K+1)     round ms: mean   P50   P90   P99"
        "     token ms: P50   P90   P99"
    )
    for row in found.rows:
        click.echo(_measured_line(row))
    click.echo(
        "\n      ms/token by the costs            round ms       speed-up by                           "
        "Chen, redrawn: time (tokens/(K+1))"
    )
    click.echo(
        "   K  predicted / measured = ratio  predicted mean    costs  alpha, costs  alpha, c  measured         HumanEval"
        "         XSum"
    )
    for row in found.rows:
        click.echo(_predicted_line(row))
    _print_remarks(found, tokens)


def _measured_line(row: LengthRow) -> str:
    alpha = "    —" if row.acceptance_rate is None else f"{row.acceptance_rate:5.2f}"
    loop, token = row.loop, row.token
    line = f"{row.length:4d}  {row.ms_per_token:8.2f} ± {row.ms_deviation:5.2f}  {row.speedup!s:>20s}  {alpha}"
    line += f"  {row.tokens_per_round:12.2f}  {row.efficiency:6.2f}"
    line += f"             {loop.mean:7.2f} {loop.p50:5.1f} {loop.p90:5.1f} {loop.p99:5.1f}"
    return f"{line}           {token.p50:7.2f} {token.p90:5.1f} {token.p99:5.1f}"


def _predicted_line(row: LengthRow) -> str:
    from outrider.theory.chinchilla import redrawn

    made = row.predicted
    line = f"{row.length:4d}  {made.ms_per_token:9.2f} / {row.ms_per_token:8.2f} = {made.ratio:5.2f}"
    line += (
        f"  {made.loop_ms:9.2f} {row.loop.mean:6.2f}  {made.speedup:6.2f}× {made.formula:12.2f}× {made.closed_form:8.2f}×"
    )
    line += f" {row.speedup.median:8.2f}×"
    points = (redrawn(domain, row.length) for domain in ("HumanEval", "XSum"))
    return line + "   " + "".join(f"      {point.relative_time:.2f} ({point.efficiency:.2f})" for point in points)


def _print_remarks(found: Sweep, tokens: int) -> None:
    from outrider.theory.chinchilla import REMARKS

    best = min(found.rows, key=lambda row: row.ms_per_token)
    expected = min(found.rows, key=lambda row: row.predicted.ms_per_token)
    measured = f"K = {best.length} ({best.ms_per_token * tokens:.0f} ms for {tokens} tokens)"
    click.echo(f"\nquickest: {measured}; by the costs K = {expected.length}")
    if found.slope_ms is not None:
        added = f"{found.slope_ms:.2f} ± {found.slope_error_ms:.2f} ms"
        click.echo(f"a further drafted token adds {added} to a round; drafting it costs {found.step_ms:.2f} ms")
    click.echo(REMARKS)
    if any(row.identical is not None for row in found.rows):
        differ = {f"K = {row.length}, {name}": str(one) for row in found.rows for name, one in row.divergences.items()}
        same = sum(row.identical or 0 for row in found.rows)
        click.echo(f"texts equal to those of K = 0: {same} of {sum(row.prompts for row in found.rows)}")
        for where, verdict in differ.items():
            click.echo(f"  {where}: {verdict}")
