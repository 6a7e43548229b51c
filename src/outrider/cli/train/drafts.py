"""`outrider train head`, `train blocks` and `train student`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from outrider.cli.files import check_new_folder, new_folder
from outrider.cli.models import ModelChoice, click_status, model_options_without_draft
from outrider.cli.shared_options import add_options, json_option
from outrider.cli.train.made import Made, as_head, as_model, finish
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.heads.config import Kind
    from outrider.models.transformers_model import TransformersModel
    from outrider.train.make import Data, DataSettings
    from outrider.train.run import RunSettings

BODY_RATE = 3e-5  # a model that has been trained unlearns at the rate that suits heads (EXPERIMENTS.md)
_OPTIONS = (
    click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The draft's folder."),
    click.option(
        "--data", multiple=True, required=True, metavar="SOURCE[@TOKENS]", help="Text file, folder, .jsonl or dataset:NAME."
    ),
    click.option(
        "--held-out", multiple=True, metavar="NAME=PATH", help="Never trained on; a part of the data if not given."
    ),
    click.option(
        "--cache", type=click.Path(path_type=Path), help="Where the target's states are kept  [default: the output]"
    ),
    click.option("--length", default=256, show_default=True, help="Tokens of a window, 16 … 8192."),
    click.option("--steps", default=2000, show_default=True, help="0: the draft as it begins, untrained."),
    click.option("--batch-size", default=8, show_default=True, help="Windows a step and device."),
    click.option("--learning-rate", default=5e-4, show_default=True),
    click.option("--loss", default="mix", show_default=True, help="kl, tv or mix."),
    click.option("--every", default=200, show_default=True, help="Steps between held-out alphas and checkpoints."),
    click.option("--hours", type=float, help="Stop with a checkpoint after that long; go on with --resume."),
    click.option("--seed", default=0, show_default=True),
    click.option("--resume", is_flag=True, help="Go on from the newest checkpoint."),
    click.option("--licence", help="A note for the card on the data's licences."),
    json_option,
)
_SHARED = (
    "output", "data", "held_out", "cache", "length", "steps", "batch_size", "learning_rate", "loss", "every", "hours",
    "seed", "resume", "licence", "as_json",
)  # fmt: skip


def _training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that all drafts share; the command gets them as `given`."""

    @wraps(command)
    def with_given(**options: Any) -> Any:
        return command(given={name: options.pop(name) for name in _SHARED}, **options)

    return model_options_without_draft(add_options(with_given, _OPTIONS))


_VOCABULARY = click.option(
    "--vocabulary",
    type=int,
    help="Tokens that are drafted: the target's most probable  [default: 8192, or those of --start]",
)
_START = click.option("--start", type=click.Path(path_type=Path), help="A head to go on from, with its shape.")
_SHAPE = ("blocks", "intermediate_size", "window", "state_layers")


@click.command()
@_training_options
@_VOCABULARY
@click.option("--depth", default=3, show_default=True, help="Drafted tokens of a chain that are trained on, 1 … 8.")
@_START
@click.option("--intermediate-size", type=int, help="Of its network  [default: the target's]")
@click.option("--window", default=512, show_default=True, help="Positions that it attends to at most.")
@click.option(
    "--state-layers",
    metavar="I,J,…",
    help="Of the target, counted from 1, whose states are read beside the last one, say 2,15,27  [default: none]",
)
def head(models: ModelChoice, given: dict[str, Any], **settings: Any) -> None:
    """An autoregressive head: one layer on the target's hidden states and the next token."""
    _head(models, given, "autoregressive", settings)


@click.command()
@_training_options
@_VOCABULARY
@click.option("--blocks", default=4, show_default=True, help="Heads, one a position.")
@_START
@click.option("--intermediate-size", type=int, help="Of each network  [default: the state's width]")
def blocks(models: ModelChoice, given: dict[str, Any], **settings: Any) -> None:
    """Blockwise heads: independent ones for the next positions, all in one small pass."""
    _head(models, given, "blockwise", settings)


@click.command()
@_training_options
@click.option("--layers", type=int, help="The target's first ones  [default: 4, without --body]")
@click.option(
    "--body",
    metavar="MODEL",
    help="A smaller model with the target's tokenizer to begin with, all layers of it, instead of the target's first ones; "
    f"the learning rate is {BODY_RATE} then, if none is given.",
)
@click.option("--intermediate-size", type=int, help="Neurons that are left in each layer of --body  [default: all of them]")
@click.option("--vocabulary", type=int, help="Tokens that are drafted: the target's most probable  [default: all]")
def student(models: ModelChoice, given: dict[str, Any], body: str | None, **shape: Any) -> None:
    """A student, for --draft FOLDER: the target's first layers (wide and shallow), or another model with fewer neurons (deep
    and narrow).
    """
    from outrider.train.losses import check_loss
    from outrider.train.run import processes
    from outrider.train.students import StudentSettings, check_student, train_student

    source = click.get_current_context().get_parameter_source("learning_rate")
    if body is not None and source is click.core.ParameterSource.DEFAULT:
        given["learning_rate"] = BODY_RATE
    use, settings = as_model(given["output"]), StudentSettings(**shape, loss=check_loss(given["loss"]))
    bodies: list[TransformersModel] = []

    def check(target: TransformersModel) -> None:
        bodies.extend([] if body is None else [_body(models, body)])
        check_student(target, settings, bodies[0] if bodies else None)

    # The layers of a shallow student are the target's own weights, which must lie open.
    target, data, run = _prepared(models, given, body is not None, vocabulary=settings.vocabulary, check=check)
    tokens, report = train_student(target, data, settings, run, given["output"], bodies.pop() if bodies else None, _bar)
    # What is predicted is for the target as it is used; the one that shallow students are made of has its weights unpacked.
    used = models.load_target() if body is None and processes().is_main_process else target
    finish(used, models, data, given, report, Made(use, f"{settings.what(body)}, over {tokens} tokens", tokens))


def _body(models: ModelChoice, name: str) -> TransformersModel:
    """In the type that it is stored in."""
    import outrider

    with click_status("Loading the body …"):
        return cast("TransformersModel", outrider.load(name, device=models.device, pack=False))


def _no_shape_with_start(start: Path | None) -> None:
    """Raise `ParameterError` if a head to go on from and a shape of another are both asked for."""
    context = click.get_current_context()
    source, default = context.get_parameter_source, click.core.ParameterSource.DEFAULT
    explicit = [name for name in _SHAPE if name in context.params and source(name) is not default]
    if start is not None and explicit:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in explicit)
        raise ParameterError(f"start has its own shape: leave out {options}, or --start {start}")


def _head(models: ModelChoice, given: dict[str, Any], kind: Kind, settings: dict[str, Any]) -> None:
    from outrider.train.losses import check_loss
    from outrider.train.make import HeadSettings, train_head

    _no_shape_with_start(settings["start"])
    layers = _layers(settings.pop("state_layers", None), settings["start"], kind)
    wanted, use = HeadSettings(kind, layers=layers, loss=check_loss(given["loss"]), **settings), as_head(given["output"])
    target, data, run = _prepared(models, given, True, layers, wanted.vocabulary)
    config, report = train_head(target, data, wanted, run, given["output"])
    what = (
        f"An {kind} head over {config.num_tokens} tokens"
        if kind == "autoregressive"
        else (f"{config.blocks} blockwise heads over {config.num_tokens} tokens")
    )
    blocks = config.blocks if kind == "blockwise" else None
    finish(target, models, data, given, report, Made(use, what, config.num_tokens, blocks, settings["start"]))


def _layers(text: str | None, start: Path | None, kind: Kind) -> tuple[int, ...]:
    """Those that were asked for, or that the head reads which is gone on from, of the same kind."""
    if start is not None:
        from outrider.heads.config import load_config

        config = load_config(start)
        if config.kind != kind:
            raise ParameterError(f"start must be a head of the same kind, got {start}: it is {config.kind}")
        return config.layers
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ParameterError(f"state-layers must be numbers of layers with commas between them, got {text!r}") from None


def _prepared(
    models: ModelChoice,
    given: dict[str, Any],
    pack: bool,
    layers: tuple[int, ...] = (),
    vocabulary: int | None = None,
    check: Callable[[TransformersModel], object] = lambda _: None,
) -> tuple[TransformersModel, Data, RunSettings]:
    """Everything before a training. check: raises if there can be none for this target, before it has read any text."""
    from outrider.models.transformers_model import TransformersModel
    from outrider.train.checkpoints import CHECKPOINTS, last_checkpoint
    from outrider.train.make import check_target, prepare
    from outrider.train.run import RunSettings, processes

    check_new_folder(given["output"])
    names = ("steps", "batch_size", "learning_rate", "every", "hours", "seed", "resume")
    run = RunSettings(**{name: given[name] for name in names})
    settings = replace(_data(given), layers=layers)
    last_checkpoint(given["output"] / CHECKPOINTS, run.resume)  # before anything is loaded
    models.refuse_compile("training")
    target = models.load_target(pack)
    if not isinstance(target, TransformersModel):
        raise ParameterError(
            f"target must be on the transformers engine to be trained for, not {target.name}'s: --engine transformers"
        )
    check_target(target)
    check(target)
    if vocabulary is not None and vocabulary > target.vocab_size:
        raise ParameterError(
            f"vocabulary must be {target.vocab_size} or less, the tokens of {target.name}, got {vocabulary}"
        )
    with new_folder(given["output"]), processes().main_process_first():  # the others find the states that it has stored
        return target, prepare(target, settings, _bar), run


def _data(given: dict[str, Any]) -> DataSettings:
    from outrider.support.text_files import passed_over
    from outrider.train.apart import check_outside
    from outrider.train.corpus import left_out, parse_source
    from outrider.train.make import DataSettings

    held_out = {}
    for text in given["held_out"]:
        name, equals, path = text.partition("=")
        if not equals or not name.isidentifier() or name == "train":
            raise ParameterError(f"held-out must be NAME=PATH with a plain name other than train, got {text!r}")
        held_out[name] = path
    sources = tuple(parse_source(text) for text in given["data"])
    names = [*(source.name for source in sources), *held_out.values()]
    check_outside(names, [given["output"]])
    if passed := sum(map(left_out, names)):
        click.echo(passed_over(passed), err=True)
    return DataSettings(sources, held_out, given["cache"] or given["output"], given["length"])


def _bar(steps: Iterable[int], title: str, unit: str) -> None:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(f"{{task.description}}: {{task.completed}} {unit}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=None)
        for done in steps:
            progress.update(task, completed=done)
