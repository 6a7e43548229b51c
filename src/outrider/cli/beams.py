"""`outrider generate --num-beams N`: beam search, with --draft speculative; what makes no sense with it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from outrider.cli.models import ModelChoice
from outrider.cli.shared_options import add_options
from outrider.errors import ParameterError
from outrider.support.checks import check_count

if TYPE_CHECKING:
    from outrider.audio import Audio
    from outrider.beam.generate import BeamGeneration
    from outrider.beam.records import BeamResult, BeamStats
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel
    from outrider.settings.beams import BeamSettings, EarlyStopping

INTERRUPTED = 130
WARM_UP_TOKENS = 4
_OPTIONS = (
    click.option("--num-beams", type=int, help="Beam search of that width, 1 … 64, instead of greedy decoding or sampling."),
    click.option("--length-penalty", type=float, default=1.0, help="Beam search: score = log-probability / length^X."),
    click.option(
        "--early-stopping",
        type=click.Choice(["no", "yes", "never"]),
        default="no",
        help="Beam search: stop once N texts are finished (yes), once none running scores better now (no) or could (never).",
    ),
    click.option(
        "--num-return-sequences", type=int, default=1, help="Beam search: texts to return, best first; up to its width."
    ),
    click.option("--draft-beams", type=int, help="Beam search: hypotheses that the draft follows  [default: --num-beams]"),
)
_OWN = ("length_penalty", "early_stopping", "num_return_sequences", "draft_beams")
_EARLY: dict[str, EarlyStopping] = {"no": False, "yes": True, "never": "never"}
_WORKS = {
    *_OWN,
    "num_beams",
    "prompt",
    "path",
    "num_draft_tokens",
    "max_new_tokens",
    "ignore_eos",
    "chat",
    "plain",
    "compare",
}
_WORKS |= {"audio", "language", "task", "as_json", "target", "draft", "dtype", "device", "engine", "threads"}


@dataclass(frozen=True)
class BeamChoice:
    """What the options say. drafts: whether a draft was named."""

    settings: BeamSettings
    draft_beams: int | None
    drafts: bool


def beam_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of beam search."""
    return add_options(command, _OPTIONS)


def beam_choice(given: dict[str, Any]) -> BeamChoice | None:
    """What was asked for, taken out of `given`; None without --num-beams. Refuses what does not go together."""
    from outrider.settings.beams import BeamSettings

    count = given.pop("num_beams")
    own = {name: given.pop(name) for name in _OWN}
    context = click.get_current_context()
    named = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if count is None:
        alone = [name for name in _OWN if name in named]
        if alone:
            raise ParameterError(f"{alone[0]} belongs to beam search: give --num-beams, or leave it out")
        return None
    changed = [p.name for p in context.command.params if p.name not in _WORKS and _differs(p, context)]
    if changed:
        option = str(changed[0]).replace("_", "-")
        raise ParameterError(
            f"--{option} can't be combined with --num-beams: beam search maximises and does not sample, in one process and "
            "without records of its rounds; leave it out"
        )
    if count == 1 and "length_penalty" in named:
        raise ParameterError("length_penalty ranks the texts of several beams: with --num-beams 1 leave it out")
    settings = BeamSettings(count, own["length_penalty"], _EARLY[own["early_stopping"]], own["num_return_sequences"])
    drafts = not given["plain"] and context.get_parameter_source("draft") is not ParameterSource.DEFAULT
    if given["compare"] and not drafts:
        raise ParameterError("compare needs a draft for beam search: name a model with --draft")
    if own["draft_beams"] is not None and not drafts:
        raise ParameterError("draft_beams needs a draft: name a model with --draft")
    if "num_draft_tokens" in named and not drafts:
        raise ParameterError("num_draft_tokens needs a draft for beam search: name a model with --draft")
    if own["draft_beams"] is not None and own["draft_beams"] < count:
        raise ParameterError(f"draft_beams must be num_beams = {count} or more, got {own['draft_beams']}")
    return BeamChoice(settings, own["draft_beams"], drafts)


def _differs(parameter: click.Parameter, context: click.Context) -> bool:
    """Whether an option has another value than its default, wherever it comes from."""
    assert parameter.name is not None
    value = context.params.get(parameter.name)
    if context.get_parameter_source(parameter.name) is ParameterSource.DEFAULT or value is None or value is False:
        return False
    return value != () and bool(value != parameter.default)


def run_beams(choice: BeamChoice, models: ModelChoice, read: str | Audio, given: dict[str, Any]) -> int:
    """Load, search, print. → exit code"""
    from outrider.beam.draft import draft_model
    from outrider.beam.generate import BeamGeneration
    from outrider.cli.sampling import parse_length
    from outrider.request.prompts import as_said

    steps = parse_length(given["num_draft_tokens"])
    if steps is not None and not isinstance(steps, int):
        raise ParameterError("num_draft_tokens must be a number or auto for beam search: nothing is known of its alpha")
    check_count("max_new_tokens", given["max_new_tokens"])
    models.refuse_compile("beam search")
    models = models if choice.drafts else replace(models, draft=())
    model = models.load_target()
    drafter = models.load_draft(model) if choice.drafts else None
    if drafter is not None:
        drafter.bind(model)
        draft_model(drafter)
    prompt = as_said(model, read, given["chat"]) if isinstance(read, str) else read

    def start(draft: Drafter | None, tokens: int = given["max_new_tokens"]) -> BeamGeneration:
        wide = choice.draft_beams if draft is not None else None
        return BeamGeneration(model, prompt, choice.settings, draft, tokens, steps, wide, given["ignore_eos"])

    if given["compare"]:
        return _compare(model, start, drafter, choice.settings, given)
    code, result = _run(start(drafter), given["max_new_tokens"])
    if given["as_json"]:
        click.echo(json.dumps({**result.to_dict(), "beam_search": asdict(choice.settings)}, ensure_ascii=False))
    else:
        _show(result)
    return code


def _run(search: BeamGeneration, tokens: int) -> tuple[int, BeamResult]:
    """Run a search under a bar on standard error. → exit code, what was found"""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("Searching", total=tokens)
        try:
            for _ in search.run():
                progress.update(bar, completed=search.steps)
        except KeyboardInterrupt:
            progress.stop()
            click.echo(f"outrider: interrupted after {search.steps} tokens", err=True)
            return INTERRUPTED, search.result()
    return 0, search.result()


def _show(result: BeamResult) -> None:
    import sys

    for number, one in enumerate(result.sequences, 1):
        if len(result.sequences) > 1:
            click.echo(f"[{number}] score {one.score:.4f}, {len(one.tokens)} tokens, ended by {one.finish_reason}")
        click.echo(one.text)
    if sys.stdout.isatty():
        click.echo(f"\n{describe(result.stats)}; ended by {result.finish_reason}", err=True)


def describe(stats: BeamStats) -> str:
    """One line of figures."""
    rate = "no drafts" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.2f} of the tested steps accepted"
    return (
        f"{stats.steps} steps in {stats.passes} passes ({stats.steps_per_pass:.2f} a pass), {rate}, "
        f"{stats.scored} tokens scored for {stats.hypotheses} hypotheses, {stats.steps_per_second:.1f} steps/s"
    )


def _compare(
    model: TextModel,
    start: Callable[..., BeamGeneration],
    drafter: Drafter | None,
    settings: BeamSettings,
    given: dict[str, Any],
) -> int:
    """Speculative beams, then plain ones, both after a warm-up: how much faster, and whether the texts agree."""
    from outrider.beam.compare import Agreement

    for side in (drafter, None):
        for _ in start(side, WARM_UP_TOKENS).run():
            pass
    code, speculative = _run(start(drafter), given["max_new_tokens"])
    if code:
        return code
    if not given["as_json"]:
        _show(speculative)
    code, plain = _run(start(None), given["max_new_tokens"])
    if code:
        return code
    found = Agreement(speculative, plain, start(None).task, model)
    if given["as_json"]:
        click.echo(json.dumps({**found.to_dict(), "beam_search": asdict(settings)}, ensure_ascii=False))
        return 0
    lines = (
        f"speculative: {describe(speculative.stats)}",
        f"plain:       {describe(plain.stats)}",
        f"speed-up:    {found.speedup:.2f}×",
        f"texts:       {found.text}",
    )
    click.echo("\n".join(lines), err=True)
    return 0
