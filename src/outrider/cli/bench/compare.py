"""Contests of speed: against other projects, and of Outrider's own set-ups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.bench.choices import conclude, make_settings, open_log, track
from outrider.cli.files import check_plot
from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.cli.shared_options import Command, add_options, json_option, log_option
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.bench.contest import Contender, Row, Run
    from outrider.bench.examples import Source
    from outrider.bench.peers import Pair
    from outrider.bench.tasks import Task
    from outrider.models.base import TextModel
    from outrider.request.prompts import Asked

_TASKS = (
    click.option(
        "--texts",
        metavar="NAME",
        help="humaneval, kinds (texts of several kinds) or jsonl:FILE with a {'prompt': …} or {'audio': FILE.wav} on each "
        "line  [default: humaneval; kinds for an encoder-decoder]",
    ),
    click.option(
        "--prompts",
        default="0-81",
        show_default=True,
        metavar="N|FIRST-LAST",
        help="The first N of HumanEval's problems or of the lines, or a range from 0.",
    ),
    click.option("--every", default=1, show_default=True, help="Take every n-th of them."),
    click.option("--max-new-tokens", default=96, show_default=True),
    click.option("--temperature", multiple=True, type=float, default=(0.0, 0.8), show_default=True),
    click.option("--top-p", default=0.95, show_default=True, help="Where the temperature is not 0."),
    log_option,
    click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the rates."),
    json_option,
)


def task_options(command: Command) -> Command:
    """Add what the comparisons of speed share: prompts, settings, lengths, log."""
    return add_options(command, _TASKS)


def _check_texts(given: dict[str, Any]) -> None:
    """Refuse what can't be asked, before anything is loaded."""
    from outrider.bench.examples import load_examples

    _problems(given)
    if given["every"] < 1:
        raise ParameterError(f"every must be 1 or more, got {given['every']}")
    texts = given["texts"]
    if texts is not None and texts.startswith("jsonl:"):
        names = [one.name for one in load_examples(_lines(texts, given))]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ParameterError(
                f"texts must have ids of their own, {twice!r} is there twice: change one, or leave them out"
            )
    elif texts not in (None, "humaneval", "kinds"):
        raise ParameterError(f"texts must be humaneval, kinds or jsonl:FILE, got {texts!r}")


def _lines(texts: str, given: dict[str, Any]) -> Source:
    from outrider.bench.examples import Source

    return Source(texts, prompts=given["prompts"], metric="none")


def _problems(given: dict[str, Any]) -> tuple[int, int]:
    """The first and the last of HumanEval's that are asked for. Raises `ParameterError`."""
    from outrider.bench.examples import Source

    return Source("humaneval", prompts=given["prompts"], metric="none").bounds


def _asked(target: TextModel, texts: str, given: dict[str, Any]) -> list[tuple[Task, Asked]]:
    """The texts and how this model is asked them."""
    from outrider.bench.asking import asked_of
    from outrider.bench.examples import load_examples
    from outrider.bench.tasks import human_eval
    from outrider.bench.texts import kinds_for
    from outrider.request.prompts import encode

    if texts.startswith("jsonl:"):
        lines = _lines(texts, given)
        return [(one, asked_of(target, lines.kind, one)) for one in load_examples(lines)[:: given["every"]]]
    tasks = kinds_for(target) if texts == "kinds" else human_eval(*_problems(given))
    return [(task, encode(target, task.prompt)) for task in tasks[:: given["every"]]]


_USUAL = ("prompt-lookup",)  # which generate has, too, whatever drafts for it
_SETUP = "Outrider in one way, DTYPE[@ENGINE][ + DRAFT]…"


@click.command()
@model_options_with_one_draft
@click.option("--setup", multiple=True, metavar="DTYPE[@ENGINE][ + DRAFT]…", help=f"{_SETUP}; beside transformers' own.")
@click.option(
    "--server", multiple=True, metavar="NAME=URL", help="One with OpenAI's completions: any engine (docs/bench.md)."
)
@click.option(
    "--generate/--no-generate",
    default=True,
    show_default=True,
    help="transformers' generate with and without drafts, and Outrider on the same weights and dtype.",
)
@click.option(
    "--version", "versions", multiple=True, metavar="NAME=VERSION", help="Of what a --server runs, for the result's record."
)
@task_options
def peers(
    models: ModelChoice,
    setup: tuple[str, ...],
    server: tuple[str, ...],
    versions: tuple[str, ...],
    generate: bool,
    log: Path | None,
    plot: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Against other projects: transformers' generate (plain, assisted by --draft, with prompt lookup) and servers.

    Everything answers the same prompts in one run, in turn. Ours: on the weights that generate has, and every --setup.
    """
    from outrider.bench.servers import parse_server, served
    from outrider.endpoint import check_reachable

    named = [parse_server(text) for text in server]
    servers = dict(named)
    if not generate and not (setup and servers):
        raise click.UsageError("--no-generate leaves nothing to compare: give --setup and --server, too")
    _check_used(generate, setup)
    check_plot(plot)
    _check_texts(given)
    about: dict[str, object] = {"bench": "peers", **_versions(versions)}
    _check_names([*dict.fromkeys(setup), *(name for name, _ in named)])
    for url in servers.values():
        check_reachable(url)
    from outrider.bench import peers as transformers_peers

    field = _Field({}, {}, set())
    if generate:
        ours, theirs = (_load_pair(models, pack) for pack in (True, False))
        names = {"target": ours.target.name, "draft": ours.draft.name if ours.draft else None}
        about |= {**names, "dtype": ours.target.dtype_name}
        found = transformers_peers.contenders(ours, theirs)
        field.add(found, {name: (*peers, *servers) for name, peers in transformers_peers.PAIRS.items()})
        target: TextModel = ours.target
    if setup:
        made, target = _setups(models, setup)
        about.setdefault("target", target.name)
        field.add(made, dict.fromkeys(made, ("generate", *servers)))
    _check_names([*field.contenders, *servers])
    field.contenders.update({name: served(url) for name, url in servers.items()})
    _contest(about, field, target, given, log, plot, as_json)


def _versions(given: Sequence[str]) -> dict[str, object]:
    """What was said of the servers' versions, under one key; nothing if nothing was said."""
    pairs = [text.partition("=") for text in given]
    wrong = next((text for text, (name, _, version) in zip(given, pairs, strict=True) if not (name and version)), None)
    if wrong is not None:
        raise ParameterError(f"version must be NAME=VERSION, got {wrong!r}: for example xllamacpp=0.2.14")
    return {"peers": {name: version for name, _, version in pairs}} if pairs else {}


@dataclass(frozen=True)
class _Field:
    """contenders: by name, all. pairs: whom each of ours is compared with. own: the names of ours."""

    contenders: dict[str, Contender]
    pairs: dict[str, Sequence[str]]
    own: set[str]

    def add(self, contenders: Mapping[str, Contender], pairs: Mapping[str, Sequence[str]]) -> None:
        """pairs: of those that are ours."""
        self.contenders.update(contenders)
        self.pairs.update(pairs)
        self.own.update(pairs.keys() & contenders.keys())


def _check_names(names: Sequence[str]) -> None:
    """Refuse a server with the name of another contender."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ParameterError(f"server must have a name of its own, got {twice} twice: choose another")


def _check_used(generate: bool, setup: Sequence[str]) -> None:
    """Refuse options that would do nothing."""
    from click.core import ParameterSource

    source = click.get_current_context().get_parameter_source
    given = [name for name in ("draft", "dtype", "engine", "compile") if source(name) == ParameterSource.COMMANDLINE]
    if not generate and given:
        raise click.UsageError(f"--{given[0]} is for what --generate compares: leave it out, and say it in --setup")
    if setup and "compile" in given:
        raise click.UsageError("--compile is for what --generate compares: leave out either it or --setup")


@click.command()
@click.option("--target", metavar="MODEL", help="Hub name, folder or .gguf file  [default: SmolLM2-135M-Instruct]")
@click.option(
    "--setup",
    multiple=True,
    default=("auto", "int8", "int4", "int8 + prompt-lookup", "int4 + prompt-lookup"),
    show_default=True,
    metavar="DTYPE[@ENGINE][ + DRAFT]…",
    help=f"{_SETUP}; the first one is what the others are compared with.",
)
@task_options
def setups(
    target: str | None, setup: tuple[str, ...], log: Path | None, plot: Path | None, as_json: bool, **given: Any
) -> None:
    """Outrider in several set-ups (engine, dtype, draft) beside each other."""
    check_plot(plot)
    _check_texts(given)
    made, first = _setups(ModelChoice(target), setup)
    names = list(made)
    field = _Field(made, dict.fromkeys(names[1:], (names[0],)), set(names))
    _contest({"bench": "setups", "target": first.name}, field, first, given, log, plot, as_json)


def _setups(models: ModelChoice, texts: Sequence[str]) -> tuple[dict[str, Contender], TextModel]:
    """A contender per set-up of the target on the device, and one of the targets."""
    from outrider.bench.setups import contenders, parse_setup

    parsed = [parse_setup(text) for text in texts]
    choices = {one: ModelChoice(models.target, one.drafts, one.dtype, models.device, one.engine) for one in parsed}
    return contenders(parsed, lambda one: choices[one].load_target(), lambda one, model: choices[one].load_draft(model))


def _load_pair(models: ModelChoice, pack: bool) -> Pair:
    from outrider.bench.peers import Pair
    from outrider.drafters import ModelDrafter
    from outrider.models.transformers_model import TransformersModel

    models = replace(models, compile=models.compile and pack)  # the other one is for transformers itself
    model = models.load_target(pack)
    if not isinstance(model, TransformersModel):
        raise ParameterError(f"dtype must be one that transformers has, to compare with it, got {models.dtype!r}")
    drafter = models.load_draft(model, pack)
    own = getattr(drafter, "model", None) if isinstance(drafter, ModelDrafter) else None  # some have one once bound
    if models.draft and models.draft != _USUAL and not isinstance(own, TransformersModel):
        named = " and ".join(models.draft)
        raise ParameterError(f"draft must be one model, by which generate is assisted, too, got {named}: say it in --setup")
    return Pair(model, own if isinstance(own, TransformersModel) else None)


def _contest(
    about: Mapping[str, object],
    field: _Field,
    target: TextModel,
    given: dict[str, Any],
    log: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run them on the prompts that were asked for; print the tables, or the object."""
    from outrider.bench.contest import best, measure, summarise
    from outrider.bench.contest_plot import plot_rates
    from outrider.bench.machine import machine
    from outrider.models.base import has_encoder

    texts = given["texts"] or ("kinds" if has_encoder(target) else "humaneval")
    asked, settings = _asked(target, texts, given), make_settings(given["temperature"], given["top_p"])
    shared = {**about, "max_new_tokens": given["max_new_tokens"]}
    if texts not in ("humaneval", "kinds"):  # those are told apart by the names of their prompts
        shared |= {"texts": texts, "prompts": [getattr(task, "digest", "") for task, _ in asked]}
    steps = measure(field.contenders, asked, settings, given["max_new_tokens"], open_log(log, shared))
    runs = track(steps, "Running", len(asked) * len(settings) * len(field.contenders))
    rows, winners = summarise(runs, field.pairs), best(runs, field.own)
    found: dict[str, object] = {**about, "prompts": len(asked), "max_new_tokens": given["max_new_tokens"]}
    found |= {"rows": [asdict(row) for row in rows], "best": [asdict(one) for one in winners], **machine()}
    conclude(log, found)
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print(rows)
        for one in winners:
            click.echo(f"{one.setting}: {one.own}, the best of ours, is {one.ratio}× {one.peer}, the best of the others")
        if texts == "kinds":
            _print_by_text(runs)
    if plot is not None:
        plot_rates(rows, field.own, plot)


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
