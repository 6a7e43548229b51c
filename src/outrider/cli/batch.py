"""`outrider batch`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.config import config_option, plain_asked
from outrider.cli.files import check_other_file
from outrider.cli.models import ModelChoice, model_options
from outrider.cli.ray import ray_options, told_of_ray
from outrider.cli.sampling import (
    alternatives_option,
    invariant_option,
    law_options,
    length_option,
    parse_length,
    told_if_greedy,
)
from outrider.cli.shared_options import prefix_cache_option, text_options
from outrider.cli.structured import structure_options, take_structure
from outrider.errors import ParameterError
from outrider.settings.drafting import check_lenience, check_without_drafts
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.batch.jobs import Prompts
    from outrider.batch.journal import Journal
    from outrider.batch.ray_pool import Cluster
    from outrider.batch.run import Tally
    from outrider.batch.setup import Setup
    from outrider.structured import Structure

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_ALWAYS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", *_PENALTIES, "seed", "ignore_eos")

_EVERY = 30.0  # seconds between two lines about the progress where there is no terminal for a bar
_TOLD = 5  # errors of prompts that are told while the run goes on; the output holds them all


@click.command()
@click.argument("prompts", metavar="INPUT.jsonl", type=click.Path(path_type=Path))
@click.option("--output", "-o", required=True, metavar="OUTPUT.jsonl", type=click.Path(path_type=Path))
@click.option("--batch-size", type=int, default=8, show_default=True, help="Prompts side by side in a process, 1 … 4096.")
@model_options
@config_option
@length_option
@alternatives_option
@click.option("--max-new-tokens", type=int, default=256, show_default=True, help="Of each prompt at most; 1 or more.")
@law_options
@click.option(
    "--lenience", type=float, default=1.0, help="Above 0. Below 1: LOSSY, accept more than the target's distribution allows."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Prompt i's randomness follows from it and i.")
@invariant_option
@text_options
@structure_options
@prefix_cache_option
@click.option("--logprobs", is_flag=True, help="Log-probabilities of the tokens, too.")
@click.option("--plain", is_flag=True, help="Without a draft, also where one is named: the baseline.")
@ray_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: what it came to.")
def batch(
    prompts: Path,
    output: Path,
    models: ModelChoice,
    cluster: Cluster | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Generate for every line of INPUT.jsonl, many at a time; the same command goes on where it was interrupted.

    A line holds {"prompt": text or token ids} or {"messages": […]}, and, where it differs from the command, max_new_tokens,
    temperature and the like, stop, seed; id and metadata are handed on. Lines of the output come as prompts are finished,
    each with its index. A prompt's output does not depend on the others (docs/batch.md).
    """
    from outrider.batch.jobs import check_prompts
    from outrider.batch.journal import Journal

    models.refuse_compile("a batch")
    given["plain"] = plain_asked(given["plain"], "draft", "num_draft_tokens", "alternatives", "lenience")
    structure = take_structure(given)
    told_if_greedy(given["temperature"])
    defaults = _defaults(given, structure)
    models.check_drafts()
    asked = check_prompts(prompts, defaults)
    check_other_file("output", output, prompts)
    setup = _setup(models, given, defaults)
    with Journal(output, settings_of(setup, asked), asked.count) as journal:
        return _run(setup, asked, journal, cluster, as_json)


def _defaults(given: dict[str, Any], structure: Structure | None) -> dict[str, Any]:
    """The options of lines that say nothing else; what is wrong with them is told here, without torch."""
    check_count("prefix_cache", given["prefix_cache"], 0)
    if not 1 <= given["batch_size"] <= 4096:
        raise ParameterError(f"batch_size must be in 1 … 4096, got {given['batch_size']}")
    lenience = check_lenience(given["lenience"])
    if given["plain"] or parse_length(given["num_draft_tokens"]) == 0:
        check_without_drafts(lenience, given["alternatives"])
    asked = {} if structure is None else asdict(structure)
    where_given = ("alternatives", "logit_bias", "logprobs", "drafter_invariant")
    beside = {name: given[name] for name in where_given} | asked
    return {
        **{name: given[name] for name in _ALWAYS},
        "stop": list(given["stop"]),
        **({"lenience": lenience} if lenience < 1.0 else {}),
        **{name: value for name, value in beside.items() if not (value is None or value is False or value == {})},
    }


def _setup(models: ModelChoice, given: dict[str, Any], defaults: dict[str, Any]) -> Setup:
    """What the processes are told."""
    return models.setup(
        draft=() if given["plain"] else models.draft,
        num_draft_tokens=parse_length(given["num_draft_tokens"]),
        batch_size=given["batch_size"],
        chat=given["chat"],
        defaults=defaults,
        prefix_cache=given["prefix_cache"],
    )


def settings_of(setup: Setup, asked: Prompts) -> dict[str, object]:
    """What all parts of a run must share: not where it runs, nor how many processes share the work."""
    from outrider.request.draft_specs import AUTO, split_choice

    about = {name: getattr(setup, name) for name in ("target", "draft", "chat", "dtype", "engine")}
    length = setup.num_draft_tokens
    asked_for = length if isinstance(length, int) else f"optimal:{length.alpha}" if length else "auto"
    about["num_draft_tokens"] = asked_for if setup.draft else 0
    named = [part for spec in setup.draft for part in split_choice(spec)]
    fixed = isinstance(length, int) and len(named) == 1 and AUTO not in named
    if setup.draft and not fixed:  # how many are drafted, or by whom, follows from the costs of so many rows
        about["batch_size"] = setup.batch_size
    return {"command": "batch", "input_sha256": asked.digest, **about, **setup.defaults}


def _run(setup: Setup, asked: Prompts, journal: Journal, cluster: Cluster | None, as_json: bool) -> int:
    from outrider.batch.run import Tally

    tally, before, code = Tally(), journal.done, 0
    if before:
        left = "going on" if before < asked.count else "nothing is left to do"
        click.echo(f"outrider: {journal.path} holds {before} of {asked.count} prompts: {left}", err=True)
    try:
        if before < asked.count:
            _compute(setup, asked, journal, cluster, tally)
    except KeyboardInterrupt:
        click.echo(
            f"outrider: interrupted after {journal.done} of {asked.count} prompts; the same command goes on", err=True
        )
        code = 130
    if as_json:
        about = {"batch": str(asked.path), "output": str(journal.path), "batch_size": setup.batch_size}
        totals: dict[str, Any] = {"total": asked.count, "done": journal.done, "before": before, "errors": journal.errors}
        totals |= {"complete": journal.done == asked.count, "peak_memory_bytes": _peak_memory()}
        click.echo(json.dumps({**about, **totals, **tally.to_dict()}))
    elif code == 0:
        click.echo(_conclusion(tally, journal), err=True)
        if "lenience" in setup.defaults:
            lenience = setup.defaults["lenience"]
            click.echo(
                f"outrider: LOSSY: lenience {lenience:g}, the texts need not follow the target's distribution", err=True
            )
    return code or int(journal.errors > 0)


def _compute(setup: Setup, asked: Prompts, journal: Journal, cluster: Cluster | None, tally: Tally) -> None:
    from contextlib import closing

    from outrider.batch.ray_pool import RayPool
    from outrider.batch.run import run_here

    jobs = (job for job in asked.jobs() if job.index not in journal)
    execute = run_here if cluster is None else RayPool(cluster)
    if cluster is not None:
        told_of_ray(cluster)
    with _progress() as progress:
        bar = progress.add_task("Loading", total=asked.count, completed=journal.done, rate="")

        def loaded(tables: Any) -> None:
            journal.keep_tables(tables)
            tally.begin()
            progress.update(bar, description="Generating")

        told = time.monotonic()
        with closing(execute(setup, jobs, journal.tables, loaded)) as records:
            for record in records:
                journal.append(record)
                tally.add(record)
                if "error" in record and tally.errors <= _TOLD:
                    progress.console.print(
                        f"outrider: prompt {record['index']}: {record['error']}", markup=False, soft_wrap=True
                    )
                rate = f"{tally.tokens / tally.seconds:.1f} tokens/s"
                progress.update(bar, completed=journal.done, rate=rate)
                if progress.disable and time.monotonic() > told + _EVERY:
                    told = time.monotonic()
                    click.echo(f"outrider: {journal.done} of {asked.count} prompts, {rate}", err=True)


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty())


def _peak_memory() -> int | None:
    """The most memory that this process has had; actors' is their own."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _conclusion(tally: Tally, journal: Journal) -> str:
    told = f"{journal.done} of {journal.count} prompts in {journal.path}"
    if tally.prompts:
        told += f"; {tally.tokens} tokens in {tally.seconds:.1f} s, {tally.tokens / tally.seconds:.1f} tokens/s"
    if tally.rounds:
        told += f", {tally.tokens / tally.rounds:.2f} a round"
    if journal.errors:
        told += f'; {journal.errors} with an error instead of a text ("error" in their lines)'
    return f"outrider: {told}"
