"""Contests of speed: against transformers, and of Outrider's own set-ups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.bench.choices import json_line_option, make_settings, track
from outrider.cli.models import ModelChoice, model_options
from outrider.cli.shared_options import Command, add_options, log_option
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.bench.contest import Contender, Row, Run
    from outrider.bench.peers import Pair
    from outrider.bench.tasks import Task

_TASKS = (
    click.option("--texts", type=click.Choice(["humaneval", "kinds"]), default="humaneval", show_default=True),
    click.option("--prompts", default="0-81", show_default=True, help="HumanEval problems, FIRST-LAST."),
    click.option("--every", default=1, show_default=True, help="Take every n-th of them."),
    click.option("--max-new-tokens", default=96, show_default=True),
    click.option("--temperature", multiple=True, type=float, default=(0.0, 0.8), show_default=True),
    click.option("--top-p", default=0.95, show_default=True, help="Where the temperature is not 0."),
    log_option,
    json_line_option,
)


def task_options(command: Command) -> Command:
    """Add what the comparisons of speed share: prompts, settings, lengths, log."""
    return add_options(command, _TASKS)


def _tasks(tokenizer: Any, given: dict[str, Any]) -> list[Task]:
    from outrider.bench.tasks import human_eval
    from outrider.bench.texts import kinds

    first, last = _range(given["prompts"])
    if given["every"] < 1:
        raise ParameterError(f"every must be 1 or more, got {given['every']}")
    return (kinds(tokenizer) if given["texts"] == "kinds" else human_eval(first, last))[:: given["every"]]


@click.command()
@model_options
@task_options
def peers(models: ModelChoice, log: Path | None, as_json: bool, **given: Any) -> None:
    """Against transformers' generate: plain, with a draft model (--draft), with prompt lookup."""
    from outrider.bench.peers import PAIRS, contenders

    ours, theirs = (_load_pair(models, pack) for pack in (True, False))
    names = {"target": ours.target.name, "draft": ours.draft.name if ours.draft else None}
    about = {"bench": "peers", **names, "dtype": ours.target.dtype_name}
    _contest(about, contenders(ours, theirs), ours.target.tokenizer, PAIRS, given, log, as_json)


@click.command()
@click.option("--target", metavar="MODEL", help="Hub name, folder or .gguf file  [default: SmolLM2-135M-Instruct]")
@click.option(
    "--setup",
    multiple=True,
    default=("auto", "int8", "int4", "int8 + prompt-lookup", "int4 + prompt-lookup"),
    show_default=True,
    metavar="DTYPE[@ENGINE][ + DRAFT]",
    help="Outrider in one way; the first one is what the others are compared with.",
)
@task_options
def setups(target: str | None, setup: tuple[str, ...], log: Path | None, as_json: bool, **given: Any) -> None:
    """Outrider in several set-ups (engine, dtype, draft) beside each other."""
    from outrider.bench.setups import contenders, parse_setup

    parsed = [parse_setup(text) for text in setup]
    choices = {one: ModelChoice(target, (one.draft or "",), one.dtype, engine=one.engine) for one in parsed}
    made, first = contenders(
        parsed, lambda one: choices[one].load_target(), lambda one, model: choices[one].load_draft(model)
    )
    pairs = {name: (parsed[0].name,) for name in made if name != parsed[0].name}
    _contest({"bench": "setups", "target": first.name}, made, first.tokenizer, pairs, given, log, as_json)


def _load_pair(models: ModelChoice, pack: bool) -> Pair:
    from outrider.bench.peers import Pair
    from outrider.drafters import ModelDrafter
    from outrider.models.base import refuse_encoder
    from outrider.models.transformers_model import TransformersModel

    models = replace(models, compile=models.compile and pack)  # the other one is for transformers itself
    model = models.load_target(pack)
    refuse_encoder(model, "bench peers")
    if not isinstance(model, TransformersModel):
        raise ParameterError(f"dtype must be one that transformers has, to compare with it, got {models.dtype!r}")
    drafter = models.load_draft(model, pack)
    own = getattr(drafter, "model", None) if isinstance(drafter, ModelDrafter) else None  # some have one once bound
    return Pair(model, own if isinstance(own, TransformersModel) else None)


def _contest(
    about: Mapping[str, object],
    contenders: Mapping[str, Contender],
    tokenizer: Any,
    pairs: Mapping[str, Sequence[str]],
    given: dict[str, Any],
    log: Path | None,
    as_json: bool,
) -> None:
    """Run them on the prompts that were asked for, print the tables, end in one JSON line. pairs: who is compared."""
    from outrider.bench.contest import measure, summarise
    from outrider.bench.machine import machine

    tasks, settings = _tasks(tokenizer, given), make_settings(given["temperature"], given["top_p"])
    steps = measure(contenders, tokenizer.encode, tasks, settings, given["max_new_tokens"], log)
    runs = track(steps, "Running", len(tasks) * len(settings) * len(contenders))
    rows = summarise(runs, pairs)
    if not as_json:
        _print(rows)
        if given["texts"] == "kinds":
            _print_by_text(runs)
    found = {"prompts": len(tasks), "max_new_tokens": given["max_new_tokens"], "rows": [asdict(row) for row in rows]}
    click.echo(json.dumps({**about, **found, **machine()}))


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
