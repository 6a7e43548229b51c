"""`outrider bench`: measurements, each beside its baseline, ending in one JSON line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.generate import read_prompt
from outrider.cli.models import ModelChoice, model_options
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.bench.drafters import Cell
    from outrider.bench.peers import Pair, Row, Run, Setting
    from outrider.bench.tasks import Task


@click.group()
def bench() -> None:
    """Measurements, each beside its baseline."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def sampling(as_json: bool) -> None:
    """The cost of temperature, top-k and top-p at a vocabulary of 152,000, beside a full sort."""
    from outrider.bench.machine import machine
    from outrider.bench.sampling_cost import VOCABULARY, measure

    found = measure()
    if not as_json:
        click.echo(f"milliseconds for 5 rows of {VOCABULARY:,} logits: median (quartiles)")
        for name, cells in found.items():
            click.echo(f"{name:18s} " + "   ".join(f"{key} {value}" for key, value in cells.items()))
    cells_out = {name: {key: asdict(value) for key, value in cells.items()} for name, cells in found.items()}
    click.echo(json.dumps({"bench": "sampling", "rows": 5, "milliseconds": cells_out, **machine()}))


@bench.command()
@click.option("--context", default=1_000_000, show_default=True, help="Tokens before the drafts.")
@click.option("--table", type=click.Path(path_type=Path), help="An n-gram table to measure, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def copying(context: int, table: Path | None, as_json: bool) -> None:
    """The cost of drafting without a model: copies and tables, microseconds a token."""
    from outrider.bench.drafting_cost import measure
    from outrider.bench.machine import machine
    from outrider.bench.statistics import Spread

    if context < 1:
        raise ParameterError(f"context must be 1 or more, got {context}")
    found = measure(context, table)
    if not as_json:
        click.echo(f"microseconds a token after {context:,} tokens: read once; a round of 8 drafted tokens")
        for name, cells in found.items():
            click.echo(f"{name:16s} {cells['read']:8.2f}   {cells['round']}")
    out = {n: {k: asdict(v) if isinstance(v, Spread) else v for k, v in cells.items()} for n, cells in found.items()}
    click.echo(json.dumps({"bench": "copying", "context": context, "microseconds": out, **machine()}))


@bench.command()
@click.option("--target", metavar="MODEL", help="Hub name, folder or .gguf file  [default: SmolLM2-135M-Instruct]")
@click.option("--reference", default="auto", show_default=True, help="The dtype that the others are compared with.")
@click.option("--dtype", multiple=True, default=("int8", "int4"), show_default=True)
@click.option("--text", type=click.Path(path_type=Path), help="A text file  [default: ten problems of HumanEval, solved]")
@click.option("--max-tokens", default=1024, show_default=True, help="Tokens of the text.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def precision(
    target: str | None, reference: str, dtype: tuple[str, ...], text: Path | None, max_tokens: int, as_json: bool
) -> None:
    """What rounding the weights does to the model: perplexity, greedy agreement, divergence."""
    from outrider.bench.machine import machine
    from outrider.bench.precision import compare_laws, default_text

    if max_tokens < 2:
        raise ParameterError(f"max_tokens must be 2 or more, got {max_tokens}")
    words = default_text() if text is None else read_prompt(None, text)
    base = ModelChoice(target, dtype=reference).load_target()
    tokens = [int(token) for token in base.tokenizer.encode(words)][:max_tokens]
    found = [compare_laws(base.dtype_name, base, base, tokens)]
    for name in dtype:
        found.append(compare_laws(name, base, ModelChoice(target, dtype=name).load_target(), tokens))
    if not as_json:
        click.echo(f"{base.name}, {found[0].tokens} tokens\n{'dtype':10s} perplexity  agreement  KL (nats)  Σ min")
        for row in found:
            cells = f"{row.perplexity:10.3f} {row.agreement:10.1%} {row.divergence:10.4f} {row.overlap:6.3f}"
            click.echo(f"{row.name:10s} {cells}")
    rows = [asdict(row) for row in found]
    click.echo(
        json.dumps({"bench": "precision", "target": base.name, "reference": base.dtype_name, "rows": rows, **machine()})
    )


@bench.command()
@model_options
@click.option("--texts", type=click.Choice(["humaneval", "kinds"]), default="humaneval", show_default=True)
@click.option("--prompts", default="0-81", show_default=True, help="HumanEval problems, FIRST-LAST.")
@click.option("--every", default=1, show_default=True, help="Take every n-th of them.")
@click.option("--max-new-tokens", default=96, show_default=True)
@click.option("--temperature", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--top-p", default=0.95, show_default=True, help="Where the temperature is not 0.")
@click.option("--log", type=click.Path(path_type=Path), help="Keep the runs here, and resume from it.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def peers(models: ModelChoice, log: Path | None, as_json: bool, **given: Any) -> None:
    """Against transformers' generate: plain, with a draft model (--draft), with prompt lookup."""
    from outrider.bench.machine import machine
    from outrider.bench.peers import Setting, summarise
    from outrider.bench.tasks import human_eval
    from outrider.bench.texts import kinds

    first, last = _range(given["prompts"])
    if given["every"] < 1:
        raise ParameterError(f"every must be 1 or more, got {given['every']}")
    settings = [Setting(t, given["top_p"] if t else 1.0) for t in given["temperature"]]
    ours, theirs = (_load_pair(models, pack) for pack in (True, False))
    tasks = kinds(ours.target.tokenizer) if given["texts"] == "kinds" else human_eval(first, last)
    tasks = tasks[:: given["every"]]
    runs = _run(ours, theirs, tasks, settings, given["max_new_tokens"], log)
    rows = summarise(runs)
    if not as_json:
        _print(rows)
        if given["texts"] == "kinds":
            _print_by_text(runs)
    names = {"target": ours.target.name, "draft": ours.draft.name if ours.draft else None}
    about: dict[str, object] = {"bench": "peers", **names, "dtype": ours.target.dtype_name}
    about |= {"prompts": len(tasks), "max_new_tokens": given["max_new_tokens"], "rows": [asdict(row) for row in rows]}
    click.echo(json.dumps({**about, **machine()}))


@bench.command("drafters")
@model_options
@click.option("--max-new-tokens", default=96, show_default=True)
@click.option("--temperature", multiple=True, type=float, default=(0.0, 1.0), show_default=True)
@click.option("--repetitions", default=3, show_default=True)
@click.option("--seeds", default=4, show_default=True, help="Texts of each cell where the temperature is not 0.")
@click.option("--log", type=click.Path(path_type=Path), help="Keep the runs here, and resume from it.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def drafters_command(models: ModelChoice, log: Path | None, as_json: bool, **given: Any) -> None:
    """Each --draft on several kinds of text: adaptive beside plain decoding, fixed lengths and the oracle."""
    from tempfile import TemporaryDirectory

    from rich.console import Console
    from rich.progress import track

    from outrider.bench.drafters import count_runs, measure, summarise
    from outrider.bench.machine import machine
    from outrider.bench.texts import kinds

    model = models.load_target()
    named = {drafter.name: drafter for drafter in (models.load_one_draft(spec, model) for spec in models.draft)}
    texts = kinds(model.tokenizer)
    temperatures, repetitions = given["temperature"], given["repetitions"]
    total = count_runs(len(named), len(texts), len(temperatures), repetitions)
    with TemporaryDirectory() as folder:
        steps = measure(
            model,
            named,
            texts,
            temperatures,
            given["max_new_tokens"],
            repetitions,
            given["seeds"],
            log or Path(folder) / "runs.jsonl",
        )
        cells = summarise(list(track(steps, "Running", total=total, console=Console(stderr=True))))
    if not as_json:
        _print_cells(cells)
    about: dict[str, object] = {"bench": "drafters", "target": model.name, "dtype": model.dtype_name}
    about |= {"max_new_tokens": given["max_new_tokens"], "repetitions": repetitions, "seeds": given["seeds"]}
    rows = [{**asdict(cell), "against_best_fixed": cell.against_best_fixed, "captured": cell.captured} for cell in cells]
    click.echo(json.dumps({**about, "cells": rows, **machine()}))


def _print_cells(cells: list[Cell]) -> None:
    head = (
        f"{'text':16s} {'draft':24s}    T  tokens/s  measured (range)     by table: auto   γ=2   γ=4   γ=8  oracle  captured"
    )
    click.echo(head + "  alpha  tokens/round  lengths (rounds)")
    for cell in cells:
        fixed = " ".join(f"{value:5.2f}" for value in cell.fixed.values())
        alpha = "    —" if cell.acceptance_rate is None else f"{cell.acceptance_rate:5.2f}"
        captured = "       —" if cell.captured is None else f"{cell.captured:8.0%}"
        lengths = " ".join(f"{length}:{count}" for length, count in cell.lengths.items())
        spread = f"{cell.speedup:5.2f} ({cell.spread[0]:.2f} – {cell.spread[1]:.2f})"
        line = f"{cell.text:16s} {cell.drafter:24.24s} {cell.temperature:4g} {cell.tokens_per_second:9.1f}  {spread}"
        line += f"          {cell.table:5.2f} {fixed}  {cell.oracle:6.2f}  {captured}"
        click.echo(f"{line}  {alpha}  {cell.tokens_per_round:12.2f}  {lengths}")


def _load_pair(models: ModelChoice, pack: bool) -> Pair:
    from outrider.bench.peers import Pair
    from outrider.drafters import ModelDrafter
    from outrider.models.transformers_model import TransformersModel

    model = models.load_target(pack)
    if not isinstance(model, TransformersModel):
        raise ParameterError(f"dtype must be one that transformers has, to compare with it, got {models.dtype!r}")
    drafter = models.load_draft(model, pack)
    own = drafter.model if isinstance(drafter, ModelDrafter) else None
    return Pair(model, own if isinstance(own, TransformersModel) else None)


def _run(ours: Pair, theirs: Pair, tasks: list[Task], settings: list[Setting], tokens: int, log: Path | None) -> list[Run]:
    from tempfile import TemporaryDirectory

    from rich.console import Console
    from rich.progress import track

    from outrider.bench.peers import contenders, measure

    total = len(tasks) * len(settings) * len(contenders(ours, theirs))
    with TemporaryDirectory() as folder:
        steps = measure(ours, theirs, tasks, settings, tokens, log or Path(folder) / "runs.jsonl")
        return list(track(steps, "Running", total=total, console=Console(stderr=True)))


def _print(rows: list[Row]) -> None:
    for setting in dict.fromkeys(row.setting for row in rows):
        click.echo(f"\n{setting}: tokens/s, median over prompts (quartiles)")
        for row in (row for row in rows if row.setting == setting):
            length = "" if row.tokens_per_round is None else f"  {row.tokens_per_round:.2f} tokens a round"
            ratios = "".join(f"  {ratio}× {peer}" for peer, ratio in row.against.items())
            click.echo(f"  {row.contender:22s} {row.rate}{length}{ratios}")


def _print_by_text(runs: list[Run]) -> None:
    """Tokens per second of every contender on every text, since these are of different kinds."""
    for setting in dict.fromkeys(run.setting for run in runs):
        chosen = [run for run in runs if run.setting == setting]
        names = list(dict.fromkeys(run.contender for run in chosen))
        click.echo(f"\n{setting}: tokens/s by text" + "".join(f"  {name:>20s}" for name in names))
        for text in dict.fromkeys(run.task for run in chosen):
            rates = {run.contender: run.rate for run in chosen if run.task == text}
            click.echo(f"{text:30s}" + "".join(f"  {rates[name]:20.2f}" for name in names))


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise ParameterError(f"prompts must be FIRST-LAST, got {text!r}: for example 0-81") from None
