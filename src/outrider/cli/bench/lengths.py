"""`outrider bench lengths`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import json_line_option, track
from outrider.cli.models import ModelChoice, model_options_with_one_draft

if TYPE_CHECKING:
    from outrider.bench.lengths import Cell


@click.command()
@model_options_with_one_draft
@click.option("--max-new-tokens", default=192, show_default=True)
@click.option(
    "--humaneval", "problems", default=12, show_default=True, help="HumanEval problems beside the seven kinds of text."
)
@json_line_option
def lengths(models: ModelChoice, max_new_tokens: int, problems: int, as_json: bool) -> None:
    """Adaptive drafting beside the best fixed length in hindsight, on recorded texts, by the cost tables."""
    from outrider.bench.lengths import record, replay
    from outrider.bench.machine import machine
    from outrider.bench.tasks import human_eval
    from outrider.bench.texts import kinds
    from outrider.costs import measured_costs
    from outrider.errors import ParameterError
    from outrider.models.base import refuse_encoder

    if not 0 <= problems <= 82 or max_new_tokens < 1:
        raise ParameterError(f"humaneval must be in 0 … 82 and max_new_tokens 1 or more, got {problems}, {max_new_tokens}")
    model = models.load_target()
    refuse_encoder(model, "bench lengths")
    drafters = [models.load_one_draft(spec, model) for spec in models.draft]
    costs = measured_costs(model)
    for drafter in drafters:
        drafter.bind(model)
        drafter.measure()
    every = human_eval(0, 81)[:: 82 // problems][:problems] if problems else []
    tasks = [*kinds(model.tokenizer), *every]
    texts = track(record(model, tasks, max_new_tokens), "Writing", len(tasks))
    steps = (replay(model, text, drafter, costs) for drafter in drafters for text in texts)
    cells = track(steps, "Replaying", len(drafters) * len(texts))
    if not as_json:
        _print_cells(cells)
    rows = [{**asdict(cell), "best_fixed": cell.best_fixed, "against_best_fixed": cell.against_best_fixed} for cell in cells]
    about = {"bench": "lengths", "target": model.name, "dtype": model.dtype_name, "max_new_tokens": max_new_tokens}
    click.echo(json.dumps({**about, "costs": dict(costs.verify_seconds), "cells": rows, **machine()}))


def _print_cells(cells: list[Cell]) -> None:
    click.echo("speed-up over plain decoding by the cost table")
    click.echo(f"{'text':16s} {'draft':24s}  adaptive  best fixed (length)  oracle  adaptive / best fixed  tokens/round")
    for cell in cells:
        best = f"{max(1.0, *cell.fixed.values()):10.2f} ({cell.best_fixed})"
        line = f"{cell.text:16s} {cell.drafter:24.24s}  {cell.adaptive:8.2f}  {best:>19s}  {cell.oracle:6.2f}"
        click.echo(f"{line}  {cell.against_best_fixed:21.3f}  {cell.tokens_per_round:12.2f}")
    ratios = [cell.against_best_fixed for cell in cells]
    click.echo(
        f"adaptive is no slower than the best fixed length in {sum(ratio >= 0.9995 for ratio in ratios)} of {len(cells)} "
        f"cells, {min(ratios):.3f} of it at least, and {min(cell.adaptive for cell in cells):.3f} of plain decoding at least"
    )
