"""`outrider bench batch`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cli.bench.choices import open_log, track
from outrider.cli.files import write
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.cli.shared_options import json_option, log_option
from outrider.errors import ParameterError
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.bench.batches import Cell


@click.command()
@model_options_with_one_draft
@click.option("--batch-sizes", default="1,2,4,8,16", show_default=True, metavar="B,…", help="Prompts side by side.")
@click.option("--lengths", default="0,1,2,4,auto", show_default=True, metavar="K,…", help="Draft lengths; 0 is added.")
@click.option("--prompts", default=500, show_default=True, help="Ragged prompts, made of HumanEval's problems.")
@click.option("--block", default=100, show_default=True, help="Prompts that go through one cell before the next one's turn.")
@click.option("--max-new-tokens", default=64, show_default=True, help="Of the longest answer; the shortest has a quarter.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option(
    "--write-prompts",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl",
    help="Write the prompts for outrider batch, and measure nothing.",
)
@log_option
@json_option
def batch(
    models: ModelChoice,
    batch_sizes: str,
    lengths: str,
    prompts: int,
    block: int,
    max_new_tokens: int,
    temperature: float,
    write_prompts: Path | None,
    log: Path | None,
    as_json: bool,
) -> None:
    """Tokens a second against the size of the batch, by draft length: where the best one falls to 0, and where it should."""
    for name, value in (("prompts", prompts), ("block", block), ("max_new_tokens", max_new_tokens)):
        check_count(name, value)
    sizes, asked = _numbers("batch_sizes", batch_sizes, 1, 4096), sorted({0, *_lengths(lengths)})
    from outrider.bench.batches import Bench, best_length, jobs_from, measure, ragged_prompts, summarise
    from outrider.bench.machine import machine

    lines = ragged_prompts(prompts, max_new_tokens)
    if write_prompts is not None:
        write(write_prompts, "".join(json.dumps(line) + "\n" for line in lines))
        return click.echo(f"outrider: {prompts} prompts written to {write_prompts}", err=True)
    setup = models.setup(defaults={"seed": 0, "temperature": temperature})
    models.refuse_compile("a batch")
    target = models.load_target()
    about: dict[str, object] = {
        "bench": "batch",
        "target": target.name,
        "draft": list(models.draft),
        "dtype": target.dtype_name,
    }
    about |= {"prompts": prompts, "block": block, "max_new_tokens": max_new_tokens, "temperature": temperature}
    kept, bench = open_log(log, about), Bench(setup, target)
    for size in sizes:
        bench.costs(size)  # measured before anything else, while the machine is as it was found
    steps = measure(bench, jobs_from(lines), sizes, asked, block, kept)
    cells = summarise(track(steps, "Measuring", len(sizes) * len(asked) * -(-prompts // block)), bench.costs)
    best = {
        size: {"measured": best_length(cells, size, False), "predicted": best_length(cells, size, True)} for size in sizes
    }
    if as_json:
        tables = {size: book.to_dict() for size, book in bench.books.items()}
        click.echo(
            json.dumps({**about, "cells": [asdict(cell) for cell in cells], "best": best, "costs": tables, **machine()})
        )
    else:
        _print(cells, best)
    return None


def _print(cells: list[Cell], best: dict[int, dict[str, int]]) -> None:
    click.echo("batch     K   tokens/s   decoding  predicted  over K = 0 (quartiles)  tokens/round  alpha")
    for cell in cells:
        length = f"{cell.length}" if cell.length >= 0 else "auto"
        predicted = "—" if cell.predicted is None else f"{cell.predicted:.1f}"
        alpha = "—" if cell.acceptance_rate is None else f"{cell.acceptance_rate:.2f}"
        line = f"{cell.batch_size:5d}  {length:>4s}  {cell.rate:9.1f}  {cell.decode_rate:9.1f}  {predicted:>9s}"
        click.echo(f"{line}  {cell.speedup!s:>22s}  {cell.tokens_per_round:12.2f}  {alpha:>5s}")
    for size, found in best.items():
        click.echo(f"batch {size}: best K {found['measured']} measured, {found['predicted']} predicted from the cost tables")


def _lengths(text: str) -> list[int]:
    from outrider.bench.settings import AUTO

    parts = text.split(",")
    return [AUTO] * ("auto" in parts) + _numbers("lengths", ",".join(part for part in parts if part != "auto"), 0, 64)


def _numbers(name: str, text: str, low: int, high: int) -> list[int]:
    """Whole numbers separated by commas, in order, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")} if text else [])
    except ValueError:
        found = [low - 1]
    if any(not low <= number <= high for number in found) or (not found and name != "lengths"):
        raise ParameterError(f"{name} must be whole numbers in {low} … {high}, separated by commas, got {text!r}")
    return found
