"""Options that name models, shared by the commands, and loading what they name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from outrider.errors import ParameterError
from outrider.models.choices import check_choices
from outrider.models.names import check_at_hand, name_of, resolve
from outrider.request.draft_specs import check_models, check_spec
from outrider.support.checks import check_count
from outrider.support.garbage import collector

if TYPE_CHECKING:
    from outrider.batch.setup import Setup
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel
    from outrider.sharded import Team


@dataclass(frozen=True)
class ModelChoice:
    """What the options say. team: the ranks that share the models, if several do. placement: of a draft model on them."""

    target: str | None = None
    draft: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    engine: str = "auto"
    compile: bool = False
    team: Team | None = None
    placement: str = "auto"

    def load_target(self, pack: bool = True) -> TextModel:
        """The target, or the default model for None; what is wrong with the options by themselves is told before."""
        self.check()
        with click_status("Loading the target …", self):
            target = self._load_target(pack)
        collector.loaded()
        return target

    def check(self) -> None:
        """Raise for what is wrong with the options by themselves, models that there are not included, without torch."""
        self.check_drafts()
        if self.team is None:  # which has engines and dtypes of its own
            check_choices(self.dtype, self.engine, self.compile)
        check_at_hand(resolve(self.target))
        for spec in self.draft:
            check_models(spec)

    def check_drafts(self) -> None:
        """Raise `ParameterError` for what is wrong with --draft by itself, wherever the models are."""
        for spec in self.draft:
            check_spec(spec)
            if self.compile:
                from outrider.request.from_specs import check_compiled

                check_compiled(spec, name_of(self.target))

    def _load_target(self, pack: bool) -> TextModel:
        import outrider

        if self.team is not None:
            self.refuse_compile("a model over several ranks")
            return self.team.load(self.target, dtype=self.dtype, engine=self.engine, pack=pack)
        how: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "engine": self.engine, "pack": pack}
        return outrider.load(self.target, **how, compile=self.compile)

    def load_draft(self, target: TextModel, pack: bool = True) -> Drafter:
        """The drafter that one or several --draft mean; models as the target is loaded, unless they say otherwise."""
        from outrider.drafters import ChoiceDrafter

        made = [self.load_one_draft(spec, target, pack) for spec in self.draft]
        return made[0] if len(made) == 1 else ChoiceDrafter(made)

    def load_one_draft(self, spec: str, target: TextModel, pack: bool = True) -> Drafter:
        """The drafter that one --draft means."""
        from outrider.request.from_specs import load_draft_model, loading_options, make_from_spec

        def load(name: str, own: dict[str, Any]) -> TextModel:
            with click_status("Loading the draft …", self):
                if self.team is None:
                    return load_draft_model(name, own, self.dtype, self.device, self.engine, self.compile, pack)
                if "num_tokens" in own:
                    raise ParameterError("num_tokens can't be used with --tensor-parallel: leave it out of --draft")
                options = loading_options(own, self.dtype, self.engine)
                return self.team.load_draft(name, placement=self.placement, pack=pack, **options)

        return make_from_spec(spec, load, target)

    def setup(self, **more: Any) -> Setup:
        """What other processes are told, to load the same target and drafts.

        more: further fields, `compile` among them where a process computes one sequence at a time.
        """
        from outrider.batch.setup import Setup

        self.check_drafts()
        how: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "engine": self.engine}
        return Setup(**{"target": self.target, "draft": self.draft, **how, **more})

    def refuse_compile(self, what: str) -> None:
        """For what is not computed by passes of a few tokens of one sequence: raise if --compile was given."""
        if self.compile:
            raise ParameterError(
                f"compile is for passes of one sequence in one process, which {what} does not use: leave it out"
            )


_TARGET = click.option("--target", metavar="MODEL", help="Hub name, folder or .gguf file  [default: SmolLM2-135M-Instruct]")


def _draft(default: str) -> Callable[..., Any]:
    return click.option(
        "--draft",
        multiple=True,
        default=(default,),
        show_default=True,
        metavar="NAME[:OPTION=VALUE,…]",
        help="Who drafts: prompt-lookup, suffix, ngram:table=FILE, head:path=FOLDER (EAGLE's and Medusa's, too), "
        "early-exit, self, random, or a model; given several times, the best at each point; auto: prompt-lookup, and the "
        "head that comes with the package for the target if there is one (docs/drafters.md).",
    )


_HOW = (
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        help="float32, bfloat16, float16 or float64; on a CPU also int8 and int4 (of the weights); auto: the "
        "checkpoint's, or what the device is fast in.",
    ),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, …"),
    click.option(
        "--engine",
        default="auto",
        show_default=True,
        help="transformers, openvino (CPU; int8, int4, float32), or llama.cpp (CPU; .gguf files with their own quantized "
        "weights); auto: the one that has the dtype.",
    ),
    click.option(
        "--compile/--no-compile",
        default=False,
        show_default=True,
        help="Score one to eight tokens of a sequence by compiled passes where these are measured to be quicker; models of "
        "the transformers engine, not int8 or int4. The first start with a model compiles for minutes, later ones for "
        "seconds.",
    ),
)
_THREADS = click.option(
    "--threads",
    type=int,
    metavar="N",
    help="1 … 1024, of a CPU, for the models of this process  [default: one a core; fewer are quicker beside other work]",
)
MOST_THREADS = 1024
_NAMES = ("target", "draft", "dtype", "device", "engine", "compile")


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --target, --draft, --dtype, --device, --engine and --compile, given to the command as `models`, and --threads."""
    return _with(command, (_TARGET, _draft("auto"), *_HOW))


def model_options_with_one_draft(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same with copies alone by default, for commands whose figures are of one draft."""
    return _with(command, (_TARGET, _draft("prompt-lookup"), *_HOW))


def model_options_without_draft(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same but for --draft, for a command whose default is another: `--draft`, multiple, is left to it."""
    return _with(command, (_TARGET, *_HOW))


def _with(command: Callable[..., Any], options: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    @wraps(command)
    def with_choice(**given: Any) -> Any:
        given.setdefault("draft", ())  # of a command that has no drafts at all
        return command(models=ModelChoice(**{name: given.pop(name) for name in _NAMES}), **given)

    wrapped = threads_option(with_choice)
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def threads_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --threads, which the command hears nothing of."""

    @wraps(command)
    def with_threads(**given: Any) -> Any:
        _use_threads(given.pop("threads"))
        return command(**given)

    return _THREADS(with_threads)


def _use_threads(count: int | None) -> None:
    """As many for every engine: they ask torch, which asks the environment when it is imported."""
    if count is None:
        return
    check_count("threads", count, 1, MOST_THREADS)
    os.environ["OMP_NUM_THREADS"] = str(count)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(count)


def load_tokenizer(target: str | None) -> Any:
    """The target's tokenizer alone."""
    from outrider.models.loading import load_tokenizer

    return load_tokenizer(target)


def click_status(message: str, models: ModelChoice | None = None) -> Any:
    """A spinner on standard error while something takes its time; nothing where that is not a terminal.

    Nothing either where a conversion or compiling may show lines of its own, since only one of them can have the line.
    """
    from contextlib import nullcontext

    from rich.console import Console

    if models is not None and (models.compile or models.engine == "openvino" or models.dtype in ("int8", "int4")):
        return nullcontext()
    return Console(stderr=True).status(message)
