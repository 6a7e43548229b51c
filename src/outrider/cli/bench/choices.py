"""What the measurements share: what is asked, how it is sampled, where the runs are kept, a bar while they are made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from outrider.cli.shared_options import Command, add_options, json_option, log_option
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.bench.examples import Source
    from outrider.bench.settings import Setting
    from outrider.models.base import TextModel
    from outrider.support.run_log import RunLog

T = TypeVar("T")
_SOURCE = (
    click.option(
        "--task",
        default="humaneval",
        show_default=True,
        metavar="NAME",
        help="humaneval, xsum, cnn_dailymail, wmt (English–German), lm1b (unconditional), chat, or jsonl:FILE with a "
        "{'prompt': …, 'reference': …} on each line.",
    ),
    click.option(
        "--data", type=click.Path(path_type=Path), help="The task's data: .jsonl, .csv or .parquet, not the hub's."
    ),
    click.option("--prompt-column", metavar="NAME", help="Where the data has its prompts; the task's own if not given."),
    click.option(
        "--prompts", default="20", show_default=True, metavar="N|FIRST-LAST", help="The first N, or a range from 0."
    ),
    click.option("--raw", is_flag=True, help="Continue the bare text, even where the model has a chat template."),
)
_SCORING = (
    click.option("--reference-column", metavar="NAME", help="Where the data has its references."),
    click.option("--metric", help="pass@1, rouge2, bleu, wer, exact, perplexity or none  [default: the task's]"),
)
_SAMPLING = (
    click.option("--temperature", multiple=True, type=float, default=(0.0, 1.0), show_default=True),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="Where the temperature is not 0."),
)
_LOG = (log_option, json_option)
_SOURCE_NAMES = ("task", "data", "prompt_column", "prompts", "raw")
_SCORING_NAMES = ("reference_column", "metric")


def experiment_options(command: Command) -> Command:
    """Add what is asked, how it is sampled, and the log; the command gets `source`, `settings`, `log` and `as_json`."""
    made = _with_source(_with_settings(command), _SOURCE_NAMES, {"metric": "none"})
    return add_options(made, (*_SOURCE, *_SAMPLING, *_LOG))


def scored_options(command: Command) -> Command:
    """The same where answers are scored, too."""
    made = _with_source(_with_settings(command), (*_SOURCE_NAMES, *_SCORING_NAMES), {})
    return add_options(made, (*_SOURCE, *_SCORING, *_SAMPLING, *_LOG))


def prompt_options(command: Command) -> Command:
    """Add what is asked and the log alone; the command gets `source`, `log` and `as_json`."""
    return add_options(_with_source(command, _SOURCE_NAMES, {"metric": "none"}), (*_SOURCE, *_LOG))


def _with_source(command: Command, names: tuple[str, ...], fixed: dict[str, Any]) -> Command:
    @wraps(command)
    def with_source(**given: Any) -> Any:
        from outrider.bench.examples import Source

        return command(source=Source(**{name: given.pop(name) for name in names}, **fixed), **given)

    return with_source


def _with_settings(command: Command) -> Command:
    @wraps(command)
    def with_settings(temperature: tuple[float, ...], top_p: float, **given: Any) -> Any:
        return command(settings=make_settings(temperature, top_p), **given)

    return with_settings


def make_settings(temperatures: tuple[float, ...], top_p: float) -> list[Setting]:
    """A setting per temperature. Raises `ParameterError` for what can't be sampled with."""
    from outrider.bench.settings import Setting
    from outrider.settings.sampling import SamplingSettings

    for temperature in temperatures:
        SamplingSettings(temperature=temperature, top_p=top_p)
    return [Setting(t, top_p if t else 1.0) for t in dict.fromkeys(temperatures)]


def drafted_lengths(given: Sequence[str], told: str, why: str) -> list[int | None]:
    """Each once, None for auto. Raises `ParameterError` where nothing would be drafted. told: in it, what was given."""
    from outrider.cli.sampling import parse_length

    parsed = [parse_length(text) for text in dict.fromkeys(given)]
    found = [length for length in parsed if length is None or (isinstance(length, int) and length > 0)]
    if len(found) < len(parsed):
        raise ParameterError(f"num_draft_tokens must be 1 or more, or auto, got {told}: {why}")
    return found


def about_runs(
    bench: str, target: TextModel, source: Source, max_new_tokens: int, drafts: Sequence[str] | None = None
) -> dict[str, object]:
    """What a log of runs must agree on. drafts: the specifications, where all runs have the same."""
    return {
        "bench": bench,
        "target": target.name,
        **({} if drafts is None else {"draft": list(drafts)}),
        "dtype": target.dtype_name,
        "device": str(target.device),
        "task": source.name,
        "data": str(source.file) if source.file else None,
        "prompt_column": source.prompt_column,
        "reference_column": source.reference_column,
        "raw": source.raw,
        "metric": source.scored_by,
        "max_new_tokens": max_new_tokens,
    }


def open_log(path: Path | None, about: Mapping[str, object]) -> RunLog:
    """The log of an experiment; runs of another machine or another number of threads are not mixed with this one's."""
    from outrider.bench.machine import machine
    from outrider.support.run_log import RunLog, result_path

    here = machine()
    log = RunLog(path, {**about, "machine": [here[name] for name in ("processor", "threads", "device")]})
    if path is not None and not log.entries:
        result_path(path).unlink(missing_ok=True)  # of a log that was there before
    return log


def conclude(path: Path | None, found: Mapping[str, object]) -> None:
    """Leave the figures beside the log, for `outrider bench report`: they need the model, which a report does not load."""
    from outrider.cli.files import write
    from outrider.support.run_log import result_path

    if path is not None:
        write(result_path(path), json.dumps(found) + "\n")


def tell(found: Mapping[str, object], as_json: bool, heading: str, tables: Callable[[], None]) -> None:
    """On standard output: all that was found as an object, or a heading and what `tables` prints."""
    if as_json:
        click.echo(json.dumps(found))
    else:
        click.echo(heading)
        tables()


def track(steps: Iterable[T], what: str, total: int) -> list[T]:
    """Collect what is measured while a bar on standard error counts it."""
    from rich.console import Console
    from rich.progress import track as rich_track

    return list(rich_track(steps, what, total=total, console=Console(stderr=True), disable=not sys.stderr.isatty()))
