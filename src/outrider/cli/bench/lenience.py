"""`outrider bench lenience`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import about_runs, drafted_lengths, experiment_options, open_log, tell, track
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.bench.examples import Source
    from outrider.bench.lenience import Row
    from outrider.bench.settings import Setting


@click.command()
@model_options_with_one_draft
@experiment_options
@click.option(
    "--lenience", multiple=True, type=float, default=(1.0, 0.5, 0.3, 0.1), show_default=True, help="Values of l to measure."
)
@click.option("--num-draft-tokens", default="4", show_default=True, metavar="N|auto", help="Tokens drafted in a round.")
@click.option("--max-new-tokens", default=128, show_default=True, help="Tokens of each text.")
def lenience(
    models: ModelChoice,
    source: Source,
    settings: list[Setting],
    log: Path | None,
    as_json: bool,
    lenience: tuple[float, ...],
    num_draft_tokens: str,
    max_new_tokens: int,
) -> None:
    """What lenience buys and costs: LOSSY for every l below 1. Leviathan A.5 and Table 5.

    For each l: acceptance, measured and as Σ min(p / l, q); tokens per round; the speed-up over plain decoding; the drift of
    the law (KL, total variation; at temperature 0 the share of tokens that are not the target's best); the audit's verdict.
    """
    from outrider.bench.examples import load_examples

    check_count("max_new_tokens", max_new_tokens)
    leniences = _leniences(lenience)
    (length,) = drafted_lengths([num_draft_tokens], repr(num_draft_tokens), "lenience is about drafted tokens")
    kind, examples = source.kind, load_examples(source)
    target = models.load_target()
    from outrider.bench.lenience import measure, summarise
    from outrider.bench.machine import machine
    from outrider.forced import check_forgets

    draft = models.load_draft(target)
    draft.bind(target)
    check_forgets(draft)
    about = about_runs("lenience", target, source, max_new_tokens, models.draft)
    about |= {"num_draft_tokens": num_draft_tokens}
    kept = open_log(log, about)
    steps = measure(target, draft, kind, examples, settings, leniences, length, max_new_tokens, kept)
    runs = track(steps, "Generating", len(examples) * len(settings) * (1 + len(leniences)))
    rows = track(summarise(target, draft, kind, examples, settings, runs), "Reading", len(settings) * len(leniences))
    out = {**about, "prompts": len(examples), "rows": [asdict(row) for row in rows], **machine()}
    heading = f"{target.name}, {target.dtype_name}, draft {draft.name}: {source.task}, {len(examples)} prompts"
    tell(out, as_json, heading, lambda: _print(rows))


def _leniences(given: tuple[float, ...]) -> list[float]:
    from outrider.settings.drafting import check_lenience

    return sorted({check_lenience(value) for value in given}, reverse=True)


def _print(rows: list[Row]) -> None:
    click.echo("below l = 1 the output is LOSSY: its distribution is not the target's; drift is per generated token")
    for setting in dict.fromkeys(row.setting for row in rows):
        click.echo(f"\n{setting}")
        drift = "KL (nats)       TV" if setting != "greedy" else "      not best    gap"
        click.echo(f"   l    α_l  Σ min(p/l,q)     z  tokens/round  speed-up              {drift}  audit")
        for row in (row for row in rows if row.setting == setting):
            click.echo(_line(row))
        papers = [r for r in rows if r.setting == setting and r.paper_alpha]
        if papers:
            told = ", ".join(f"l = {r.lenience:g}: α {r.paper_alpha}, {r.paper_speedup}×" for r in papers)
            click.echo(f"Leviathan (T5-XXL, T5-small): {told}")


def _line(row: Row) -> str:
    alpha = (
        "     –             –" if row.alpha is None or row.expected is None else f"{row.alpha:6.3f}  {row.expected:12.3f}"
    )
    z = "    –" if row.z is None else f"{row.z:5.1f}"
    drift = (
        f"{row.differ:14.1%} {row.best_gap:6.3f}" if row.divergence is None else f"{row.divergence:9.4f}  {row.moved:7.4f}"
    )
    audit = f"{row.verdict}: {row.reason}"
    return f"{row.lenience:4g} {alpha}  {z}  {row.tokens_per_round:12.2f}  {row.speedup!s:20s}  {drift}  {audit}"
