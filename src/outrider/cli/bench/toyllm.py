"""`outrider bench toyllm`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import conclude, open_log, tell, track
from outrider.cli.models import ModelChoice
from outrider.cli.shared_options import json_option, log_option
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.bench.toyllm import Reproduction


@click.command()
@click.option("--target", default="gpt2-xl", show_default=True, metavar="MODEL", help="Hub name or folder.")
@click.option("--draft", default="gpt2", show_default=True, metavar="MODEL", help="Hub name, folder, or another drafter.")
@click.option("--dtype", default="auto", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--num-draft-tokens", "lookahead", default=4, show_default=True, help="K.")
@click.option("--total-tokens", default=266, show_default=True, help="T: prompt and continuation.")
@click.option("--repetitions", default=3, show_default=True)
@log_option
@json_option
def toyllm(
    target: str,
    draft: str,
    dtype: str,
    device: str,
    lookahead: int,
    total_tokens: int,
    repetitions: int,
    log: Path | None,
    as_json: bool,
) -> None:
    """The toyllm article's experiment (GPT-2 XL with GPT-2, one prompt, greedy), its 2.12× beside ours."""
    from outrider.settings.drafting import MAX_DRAFT

    check_count("num_draft_tokens", lookahead, 1, MAX_DRAFT)
    check_count("repetitions", repetitions)
    models = ModelChoice(target, (draft,), dtype, device)
    model = models.load_target()
    from outrider.bench.machine import machine
    from outrider.bench.toyllm import Article, measure, new_tokens, reproduce
    from outrider.models.base import refuse_encoder

    refuse_encoder(model, "bench toyllm")
    new_tokens(model, total_tokens)
    drafter = models.load_draft(model)
    about: dict[str, object] = {"bench": "toyllm", "target": model.name, "draft": drafter.name, "dtype": model.dtype_name}
    about |= {"device": str(model.device), "num_draft_tokens": lookahead, "total_tokens": total_tokens}
    kept = open_log(log, about)
    runs = track(measure(model, drafter, lookahead, total_tokens, repetitions, kept), "Running", 2 * repetitions)
    drafter.bind(model)
    drafter.measure()
    found = reproduce(runs, model, drafter, lookahead)
    out = {**about, "repetitions": repetitions, "article": asdict(Article()), "ours": asdict(found), **machine()}
    conclude(log, out)
    heading = f"{model.name} with {drafter.name}, K = {lookahead}, T = {total_tokens}, greedy, {repetitions} repetitions"
    tell(out, as_json, heading, lambda: _print(found))


def _print(found: Reproduction) -> None:
    from outrider.bench.toyllm import PROMPT, Article

    theirs, ours = Article(), found
    alpha = "—" if ours.acceptance_rate is None else f"{ours.acceptance_rate:.3f}"
    closed = "—" if ours.predicted_closed is None else f"{ours.predicted_closed:.2f}×"
    lines = [
        ("", "toyllm", "here"),
        ("plain, seconds", f"{theirs.plain_seconds:.2f}", f"{ours.plain_seconds:.2f}"),
        ("speculative, seconds", f"{theirs.speculative_seconds:.2f}", f"{ours.speculative_seconds:.2f}"),
        (
            "speed-up",
            f"{theirs.speedup:.2f}×",
            f"{ours.speedup.median:.2f}× ({ours.speedup.low:.2f} – {ours.speedup.high:.2f})",
        ),
        ("predicted, its formula", f"{theirs.predicted:.2f}×", f"{ours.predicted_article:.2f}×"),
        ("predicted, alpha and c", "", closed),
        ("predicted, measured costs", "", f"{ours.predicted_costs:.2f}×"),
        ("target, ms a token", f"{theirs.target_ms:.1f}", f"{ours.target_ms:.1f}"),
        ("draft, ms a token", f"{theirs.draft_ms:.1f}", f"{ours.draft_ms:.1f}"),
        ("r' = tokens/round/(K+1)", f"{theirs.efficiency:.3f}", f"{ours.efficiency:.3f}"),
        ("alpha = accepted/tested", "", alpha),
        ("texts", "identical", "identical" if ours.identical else str(ours.divergence or "of different length")),
    ]
    for name, left, right in lines:
        click.echo(f"  {name:27s} {left:>10s}  {right}")
    click.echo(f"\n{PROMPT}{ours.text}")
