"""`outrider bench lengths`."""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import track
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.cli.shared_options import json_option

if TYPE_CHECKING:
    from outrider.bench.lengths import Cell


@click.command()
@model_options_with_one_draft
@click.option("--max-new-tokens", default=192, show_default=True)
@click.option(
    "--temperature", multiple=True, type=float, default=(0.0,), show_default=True, help="May be given several times."
)
@click.option("--seeds", default=4, show_default=True, help="Texts of each prompt where the temperature is not 0.")
@click.option(
    "--humaneval",
    "problems",
    type=int,
    show_default="12, or 0 for an encoder-decoder",
    help="HumanEval problems beside the texts of several kinds.",
)
@json_option
def lengths(
    models: ModelChoice,
    max_new_tokens: int,
    temperature: tuple[float, ...],
    seeds: int,
    problems: int | None,
    as_json: bool,
) -> None:
    """Adaptive drafting beside the best fixed length in hindsight, on recorded texts, by the cost tables."""
    from outrider.errors import ParameterError
    from outrider.settings.sampling import SamplingSettings

    if not 0 <= (problems or 0) <= 82 or max_new_tokens < 1:
        raise ParameterError(f"humaneval must be in 0 … 82 and max_new_tokens 1 or more, got {problems}, {max_new_tokens}")
    if seeds < 1:
        raise ParameterError(f"seeds must be 1 or more, got {seeds}")
    for value in temperature:
        SamplingSettings(temperature=value)
    model = models.load_target()
    from outrider.bench.lengths import check_replayed, replay
    from outrider.bench.machine import machine
    from outrider.bench.recorded import cells_of, number_of_texts, record
    from outrider.bench.tasks import human_eval
    from outrider.bench.texts import kinds_for
    from outrider.costs import measured_costs
    from outrider.models.base import has_encoder

    if problems is None:
        problems = 0 if has_encoder(model) else 12
    drafters = [models.load_one_draft(spec, model) for spec in models.draft]
    costs = measured_costs(model)
    every = human_eval(1, 82)[:: 82 // problems][:problems] if problems else []  # the first is among the kinds
    tasks = [*kinds_for(model), *every]
    for drafter in drafters:
        check_replayed(model, drafter, temperature)
        drafter.measure()
    number = len(tasks) * sum(number_of_texts(value, seeds) for value in temperature)
    texts = track(record(model, tasks, max_new_tokens, temperature, seeds), "Writing", number)
    alike = cells_of(texts)
    steps = (replay(model, of_one, drafter, costs) for drafter in drafters for of_one in alike)
    cells = track(steps, "Replaying", len(drafters) * len(alike))
    if not as_json:
        _print_cells(cells)
        return
    rows = [
        {
            **asdict(cell),
            "best_fixed": cell.best_fixed,
            "against_best_fixed": cell.against_best_fixed,
            "captured": cell.captured,
        }
        for cell in cells
    ]
    about: dict[str, object] = {"bench": "lengths", "target": model.name, "dtype": model.dtype_name}
    about |= {"max_new_tokens": max_new_tokens, "seeds": seeds}
    click.echo(json.dumps({**about, "costs": costs.to_dict(), "cells": rows, **machine()}))


def _print_cells(cells: list[Cell]) -> None:
    click.echo("speed-up over plain decoding by the cost table")
    click.echo(
        f"{'text':16s} {'T':>4s} {'seeds':>5s} {'draft':24s}  adaptive  best fixed (length)  oracle  adaptive / best fixed  "
        "tokens/round"
    )
    for cell in cells:
        best = f"{max(1.0, *cell.fixed.values()):10.2f} ({cell.best_fixed})"
        about = f"{cell.text:16s} {cell.temperature:4g} {cell.seeds:5d} {cell.drafter:24.24s}"
        line = f"{about}  {cell.adaptive:8.2f}  {best:>19s}"
        click.echo(f"{line}  {cell.oracle:6.2f}  {cell.against_best_fixed:21.3f}  {cell.tokens_per_round:12.2f}")
    for key in dict.fromkeys((cell.temperature, cell.drafter) for cell in cells):
        mine = [cell for cell in cells if (cell.temperature, cell.drafter) == key]
        ratios = [cell.against_best_fixed for cell in mine]
        shares = [cell.captured for cell in mine if cell.captured is not None]
        captured = f"; {fmean(shares):.0%} of the oracle's gain on average" if shares else ""
        click.echo(
            f"temperature {key[0]:g}, {key[1]}: adaptive is no slower than the best fixed length in "
            f"{sum(ratio >= 0.9995 for ratio in ratios)} of {len(mine)} texts, {fmean(ratios):.3f} of it on average and "
            f"{min(ratios):.3f} at least, and {min(cell.adaptive for cell in mine):.3f} of plain decoding at least{captured}"
        )
