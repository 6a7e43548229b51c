"""`outrider bench drafters`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.bench.choices import open_log, track
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.cli.sampling import invariant_option
from outrider.cli.shared_options import json_option, log_option
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.bench.drafters import Cell, Noise


@click.command()
@model_options_with_one_draft
@click.option("--max-new-tokens", default=96, show_default=True)
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 1.0), show_default=True)
@click.option("--repetitions", default=3, show_default=True)
@click.option("--seeds", default=4, show_default=True, help="Texts of each cell where the temperature is not 0.")
@invariant_option
@log_option
@json_option
def drafters(models: ModelChoice, log: Path | None, as_json: bool, **given: Any) -> None:
    """Each --draft on several kinds of text: adaptive beside plain decoding, fixed lengths and the oracle."""
    for name in ("repetitions", "seeds", "max_new_tokens"):
        check_count(name, given[name])
    model = models.load_target()
    from outrider.bench.drafters import Matrix, count_runs, measure, noise_of, of_one_text, over_all_texts, summarise
    from outrider.bench.machine import machine
    from outrider.bench.texts import kinds_for
    from outrider.request.draft_names import where_apart

    made = {spec: models.load_one_draft(spec, model) for spec in dict.fromkeys(models.draft)}
    names = where_apart({spec: drafter.name for spec, drafter in made.items()})
    named = {names[spec]: drafter for spec, drafter in made.items()}
    texts = kinds_for(model)
    matrix = Matrix(**given)
    total = count_runs(len(named), len(texts), matrix.temperatures, matrix.repetitions)
    about: dict[str, object] = {"bench": "drafters", "target": model.name, "dtype": model.dtype_name}
    about |= {"max_new_tokens": matrix.max_new_tokens, "seeds": matrix.seeds}
    if matrix.drafter_invariant:  # logs of before are of runs without
        about["drafter_invariant"] = True
    steps = measure(model, named, texts, matrix, open_log(log, about))
    runs = list(track(steps, "Running", total))
    cells = summarise(runs)
    noise, overall = noise_of(cells), over_all_texts(cells)
    slower = noise.slower(cells)
    alike = [run for run in runs if run.temperature == 0 or matrix.drafter_invariant]
    same, known = of_one_text(alike)
    if not as_json:
        _print_cells(cells)
        if known:
            click.echo(f"texts that have to be plain decoding's: {same} of {known} are, token for token")
        _print_noise(noise, slower, overall)
        return
    about |= {"repetitions": matrix.repetitions}
    rows = [{**asdict(cell), "against_best_fixed": cell.against_best_fixed, "captured": cell.captured} for cell in cells]
    about["same_texts"] = [same, known]
    about["noise"] = asdict(noise)
    about["slower"] = [[cell.text, cell.drafter, cell.temperature] for cell in slower]
    about["all_texts"] = [[*key, speedup] for key, speedup in overall.items()]
    click.echo(json.dumps({**about, "cells": rows, **machine()}))


def _print_cells(cells: list[Cell]) -> None:
    head = (
        f"{'text':16s} {'draft':24s}    T  tokens/s  measured (range)     by table: auto   γ=2   γ=4   γ=8  oracle  captured"
    )
    click.echo(head + "  alpha  tokens/round  lengths (rounds)")
    for cell in cells:
        fixed = " ".join(f"{value:5.2f}" for value in cell.fixed.values()) or "    —     —     —"
        alpha = "    —" if cell.acceptance_rate is None else f"{cell.acceptance_rate:5.2f}"
        captured = "       —" if cell.captured is None else f"{cell.captured:8.0%}"
        lengths = " ".join(f"{length}:{count}" for length, count in cell.lengths.items())
        spread = f"{cell.speedup:5.2f} ({cell.spread[0]:.2f} – {cell.spread[1]:.2f})"
        line = f"{cell.text:16s} {cell.drafter:24.24s} {cell.temperature:4g} {cell.tokens_per_second:9.1f}  {spread}"
        line += f"          {cell.table:5.2f} {fixed}  {cell.oracle:6.2f}  {captured}"
        click.echo(f"{line}  {alpha}  {cell.tokens_per_round:12.2f}  {lengths}")


def _print_noise(noise: Noise, slower: list[Cell], overall: dict[tuple[str, float], float]) -> None:
    click.echo(
        f"noise: the ratio of two plain runs has a standard deviation of {noise.pair:.1%} ({noise.pairs} pairs), so a "
        f"cell is slower than plain decoding, and not by chance, below {1.0 - noise.cell:.3f}: "
        + (", ".join(f"{c.text} with {c.drafter} at {c.temperature:g} ({c.speedup:.2f})" for c in slower) or "none is")
    )
    for (drafter, temperature), speedup in overall.items():
        click.echo(f"all texts, {drafter}, temperature {temperature:g}: {speedup:.3f}")
