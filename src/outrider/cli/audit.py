"""`outrider audit`."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.files import check_file, check_other_file, check_plot
from outrider.cli.models import ModelChoice, model_options_without_draft
from outrider.cli.ray import ray_options, told_of_ray
from outrider.cli.room import what_lacks
from outrider.cli.sampling import alternatives_option, invariant_option, told_if_greedy, truncation_options
from outrider.cli.shared_options import json_option
from outrider.cli.tensor_parallel import tensor_parallel_options
from outrider.errors import OutriderError, ParameterError

if TYPE_CHECKING:
    from outrider.audit.text import Text
    from outrider.audit.verdict import Report
    from outrider.batch.ray_pool import Cluster
    from outrider.draft_length import OptimalLength
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel
    from outrider.request.prompts import Prompt
    from outrider.sampling import SamplingSettings

OWN_DRAFT = "self:temperature=1.5"  # rejected often enough to show every fault, whatever the target


@dataclass(frozen=True)
class _Wanted:
    """What the command line asks for besides models and settings."""

    tokens: int
    length: str
    outputs: Path | None
    endpoint: str | None
    extra: str | None
    log: Path | None
    rounding: float | None
    seed: int
    cluster: Cluster | None
    prompts: Sequence[Prompt]
    models: ModelChoice
    alternatives: int | None = None
    drafter_invariant: bool = False

    @property
    def own(self) -> bool:
        """Whether Outrider itself is audited."""
        return self.outputs is None and self.endpoint is None


_DRAFT = (
    "Who drafts, as for generate; for others' outputs, who drafted if that is known  [default: " + OWN_DRAFT + "; unknown]"
)
_OUTPUTS = 'Audit these outputs of any engine: JSON lines of {"prompt": text or ids, "tokens": ids}.'
_PROMPTS = 'Yours: JSON lines of {"prompt": text} or {"audio": FILE.wav}, or a text file.  [default: 16 beginnings of texts]'
_TOKENS = "How many to generate at least, for each temperature."


@click.command()
@model_options_without_draft
@tensor_parallel_options
@click.option("--draft", multiple=True, metavar="NAME[:OPTION=VALUE,…]", help=_DRAFT)
@click.option("--num-draft-tokens", "length", metavar="N|auto|optimal:ALPHA", default="4", show_default=True)
@alternatives_option
@click.option(
    "--temperature", multiple=True, type=float, default=(1.0,), show_default=True, help="May be given several times."
)
@truncation_options
@invariant_option
@click.option("--tokens", type=int, default=5000, show_default=True, help=_TOKENS)
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help=_PROMPTS)
@click.option("--outputs", type=click.Path(path_type=Path), metavar="FILE", help=_OUTPUTS)
@click.option("--endpoint", metavar="URL", help="Audit a server with OpenAI's completions: http://localhost:8080/v1 say.")
@click.option("--extra", metavar="JSON", help="Further fields of the requests to the server.")
@click.option("--log", type=click.Path(path_type=Path), metavar="FILE", help="Keep the texts here, and resume from them.")
@click.option("--rounding", type=float, help="By how much the engine's logits may differ from these  [default: measured]")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the histograms of the transform.")
@click.option("--seed", type=int, default=0, show_default=True)
@ray_options
@json_option
def audit(models: ModelChoice, plot: Path | None, as_json: bool, **given: Any) -> int:
    """Is a sampler exact? Ours, or any engine's whose weights --target names.

    Exit code: 0 exact, 1 not exact, 2 could not tell.
    """
    models.refuse_compile("an audit")
    told_if_greedy(max(given["temperature"]))
    settings = _settings(given)
    check_other_file("log", given["log"], given["prompts"])
    given["prompts"] = _prompts(given["prompts"])
    wanted = _Wanted(models=models, **given)
    _check(wanted, settings, plot)
    try:
        reports = _reported(models, settings, wanted, plot, as_json)
    except (click.ClickException, BrokenPipeError):
        raise
    except Exception as error:  # whatever it is: 1 would say that the sampler is not exact
        said = str(error) if isinstance(error, OutriderError) else what_lacks(error)
        click.echo(traceback.format_exc() if said is None else f"outrider: {said}", err=True)
        return 2
    codes = {report.exit_code for report in reports}
    return 1 if 1 in codes else max(codes)


def _reported(
    models: ModelChoice, settings: list[SamplingSettings], wanted: _Wanted, plot: Path | None, as_json: bool
) -> list[Report]:
    """The audits, told as they are done."""
    from outrider.cli.audit_report import as_object, draw, show

    model = models.load_target()
    drafter = _drafter(models, model, wanted)
    reports = []
    for one in settings:
        reports.append(_audit(model, drafter, one, wanted, len(settings)))
        if not as_json:
            show(reports[-1])
    if as_json:
        click.echo(json.dumps(as_object(reports, model, drafter)))
    if plot is not None:
        draw(reports, plot)
    return reports


def _settings(given: dict[str, Any]) -> list[SamplingSettings]:
    from outrider.settings.sampling import SamplingSettings

    rest = {name: given.pop(name) for name in ("top_k", "top_p", "min_p")}
    return [SamplingSettings(temperature=temperature, **rest) for temperature in given.pop("temperature")]


def _prompts(path: Path | None) -> Sequence[Prompt]:
    from outrider.audit.inputs import PROMPTS
    from outrider.request.prompt_file import read_prompts

    return PROMPTS if path is None else read_prompts(path)


def _check(wanted: _Wanted, settings: list[SamplingSettings], plot: Path | None) -> None:
    """Refuse what can't work before a model is loaded."""
    from outrider.audit.inputs import parse_extra, read_lines
    from outrider.cli.sampling import parse_length
    from outrider.endpoint import check_reachable
    from outrider.settings.seed import check_seed

    parse_extra(wanted.extra)
    if wanted.outputs is not None and wanted.endpoint is not None:
        raise click.UsageError("--outputs and --endpoint exclude each other: leave one out")
    if wanted.outputs is not None and wanted.log is not None:
        raise click.UsageError("--log keeps what is generated, --outputs is there already: leave one out")
    if len(settings) > 1 and not wanted.own:
        raise click.UsageError("--temperature must be given once for an engine's outputs: they were made at one")
    if len(settings) > 1 and wanted.log is not None:
        raise click.UsageError("--log holds texts of one temperature: give --temperature once")
    _check_used(wanted)
    if wanted.tokens < 1:
        raise ParameterError(f"tokens must be 1 or more, got {wanted.tokens}: 5000 show most faults")
    if wanted.rounding is not None and not 0 <= wanted.rounding < 100:
        raise ParameterError(f"rounding must be in [0, 100), got {wanted.rounding}: it is a difference of logits")
    if plot is not None and all(one.greedy for one in settings):
        raise ParameterError("plot must be of a temperature above 0: a greedy distribution has no histogram")
    check_file(wanted.log)
    if wanted.outputs is not None:
        read_lines(wanted.outputs)
    check_plot(plot)
    parse_length(wanted.length)
    check_seed(wanted.seed)
    if wanted.endpoint is not None:
        check_reachable(wanted.endpoint)


def _check_used(wanted: _Wanted) -> None:
    """Refuse options that would do nothing."""
    from click.core import ParameterSource

    source = click.get_current_context().get_parameter_source
    if wanted.extra is not None and wanted.endpoint is None:
        raise click.UsageError("--extra is for the requests to a server: give --endpoint, too")
    if not wanted.own and wanted.cluster is not None:
        raise click.UsageError("--ray spreads Outrider's own texts: leave it out for another engine's outputs")
    if wanted.models.team is not None and wanted.cluster is not None:
        raise click.UsageError("--ray and --tensor-parallel exclude each other: leave one out")
    if not wanted.own and source("length") == ParameterSource.COMMANDLINE:
        raise click.UsageError("--num-draft-tokens is for Outrider's own decoder: leave it out for another engine's outputs")
    if not wanted.own and wanted.alternatives is not None:
        raise click.UsageError("--alternatives is for Outrider's own decoder: leave it out for another engine's outputs")
    if not wanted.own and wanted.drafter_invariant:
        raise click.UsageError("--drafter-invariant is for Outrider's own decoder: leave it out for others' outputs")
    if wanted.outputs is not None and source("prompts") == ParameterSource.COMMANDLINE:
        raise click.UsageError("--prompts is what to generate from, --outputs is there already: leave one out")
    if wanted.outputs is not None and source("tokens") == ParameterSource.COMMANDLINE:
        raise click.UsageError("--tokens is how many to generate, --outputs is there already: leave one out")


def _drafter(models: ModelChoice, model: TextModel, wanted: _Wanted) -> Drafter | None:
    from dataclasses import replace

    from outrider.forced import check_forgets

    specs = models.draft or ((OWN_DRAFT,) if wanted.own else ())
    if not specs:
        return None
    drafter = replace(models, draft=specs).load_draft(model)
    check_forgets(drafter)
    drafter.bind(model)
    return drafter


def _audit(model: TextModel, drafter: Drafter | None, sampling: SamplingSettings, wanted: _Wanted, audits: int) -> Report:
    from rich.console import Console
    from rich.progress import Progress

    from outrider.audit.sampled import TextAudit
    from outrider.audit.sources import name_of, read_texts
    from outrider.audit.verdict import judge
    from outrider.models.base import end_tokens
    from outrider.request.own_rules import law_along
    from outrider.request.prompts import prepare

    texts: Iterable[Text]
    if wanted.outputs is not None:
        texts = held = read_texts(wanted.outputs, model, sampling)
        prefix = held[0].tokens[: held[0].prompt_length]
    else:
        texts = _made(model, drafter, sampling, wanted)
        every = [prepare(model, prompt) for prompt in wanted.prompts]  # what can't be read is said before any work
        prefix = tuple(every[0].tokens)
    ends = frozenset() if wanted.own else end_tokens(model)  # our own texts ignore them
    invariant = wanted.drafter_invariant
    audit = TextAudit(model, drafter, law_along(model, sampling, prefix), wanted.rounding, wanted.seed, ends, invariant)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("Generating and scoring", total=wanted.tokens)
        for text in texts:
            audit.add(text)
            progress.update(bar, completed=min(audit.count, wanted.tokens))
        progress.update(bar, completed=wanted.tokens)
    return judge(audit, name_of(sampling), audits=audits)


def _made(model: TextModel, drafter: Drafter | None, sampling: SamplingSettings, wanted: _Wanted) -> Iterator[Text]:
    """The texts saved before, and fresh ones after them."""
    from outrider.audit.sources import drop_torn_line, read_texts, to_json

    # As it was asked for: by its name alone a draft at another temperature would be the same.
    asked = " + ".join(wanted.models.draft or ((OWN_DRAFT,) if drafter is not None else ())) or None
    names = [] if asked is None or drafter is None else [asked, drafter.name]
    invariant = wanted.drafter_invariant
    saved: list[Text] = []
    if wanted.log is not None and wanted.log.exists():
        drop_torn_line(wanted.log)
        saved = read_texts(wanted.log, model, sampling, names, invariant) if wanted.log.stat().st_size else []
    yield from saved
    missing = wanted.tokens - sum(len(text.tokens) - text.prompt_length for text in saved)
    for text in _fresh(model, drafter, sampling, wanted, missing, len(saved)):
        if wanted.log is not None:
            with wanted.log.open("a", encoding="utf-8") as file:
                file.write(to_json(text, sampling, model.name, asked, invariant) + "\n")
        yield text


def _fresh(
    model: TextModel, drafter: Drafter | None, sampling: SamplingSettings, wanted: _Wanted, tokens: int, done: int
) -> Iterator[Text]:
    from outrider.audit.endpoint import endpoint_texts
    from outrider.audit.inputs import parse_extra
    from outrider.audit.sources import own_texts
    from outrider.cli.sampling import parse_length

    if wanted.endpoint is not None:
        extra = parse_extra(wanted.extra)
        return endpoint_texts(wanted.endpoint, model, sampling, tokens, extra, wanted.prompts, wanted.seed, done)
    length = parse_length(wanted.length)
    if wanted.cluster is not None:
        return _spread(model, sampling, wanted, length, tokens, done)
    beside, invariant = wanted.alternatives, wanted.drafter_invariant
    return own_texts(model, drafter, sampling, tokens, length, wanted.prompts, wanted.seed, done, beside, invariant)


def _spread(
    model: TextModel, sampling: SamplingSettings, wanted: _Wanted, length: int | OptimalLength | None, tokens: int, done: int
) -> Iterator[Text]:
    """By actors that load the models for themselves (`audit.spread`)."""
    from outrider.audit.sources import ROWS
    from outrider.audit.spread import spread_texts

    assert wanted.cluster is not None
    told_of_ray(wanted.cluster)
    draft = wanted.models.draft or (OWN_DRAFT,)
    defaults = {"seed": 0, "alternatives": wanted.alternatives, "drafter_invariant": wanted.drafter_invariant}
    setup = wanted.models.setup(draft=draft, num_draft_tokens=length, batch_size=ROWS, rounds=True, defaults=defaults)
    return spread_texts(wanted.cluster, setup, model, sampling, tokens, wanted.seed, done, wanted.prompts)
