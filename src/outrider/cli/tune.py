"""`outrider tune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.files import check_file, check_other_file, write
from outrider.cli.models import ModelChoice, model_options_without_draft
from outrider.cli.ray import ray_options, told_of_ray
from outrider.cli.sampling import told_if_greedy, truncation_options
from outrider.cli.shared_options import json_option
from outrider.errors import ParameterError
from outrider.models.names import DEFAULT_MODEL

if TYPE_CHECKING:
    from outrider.batch.ray_pool import Cluster
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel
    from outrider.request.prompts import Asked, Prompt
    from outrider.sampling import SamplingSettings
    from outrider.tune.configuration import Configuration
    from outrider.tune.predict import Candidate
    from outrider.tune.trial import Run, Setup

_CANDIDATES = ("prompt-lookup", "suffix")
_SHOWN = (0, 1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class _Found:
    """The outcome: predictions, runs, choice. encoder: whether the target has one, as vLLM's and llama.cpp's have not."""

    candidates: list[Candidate]
    runs: list[Run]
    setups: dict[str, tuple[str | None, int | str]]
    configuration: Configuration
    chosen: str
    encoder: bool


@click.command()
@click.argument("positional", required=False, metavar="[TARGET]")
@model_options_without_draft
@click.option(
    "--draft",
    multiple=True,
    metavar="NAME[:OPTION=VALUE,…]",
    help="A candidate; may be given several times.  [default: prompt-lookup, suffix]",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Yours: JSON lines of {"prompt": text} or {"audio": FILE.wav}, or a text file.  [default: a few of all kinds]',
)
@click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Of each prompt.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@truncation_options
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Write what was found, for generate --config.",
)
@ray_options
@json_option
def tune(positional: str | None, models: ModelChoice, output: Path | None, as_json: bool, **given: Any) -> None:
    """Which draft, and how many tokens? Predicted from acceptance and costs on your prompts, then measured.

    With --ray, the target's texts, by which drafts are judged, are written by actors; all times are measured here.
    """
    from dataclasses import replace

    if positional is not None and models.target is not None:
        raise click.UsageError("TARGET and --target are the same: give one of them")
    models = replace(models, target=positional or models.target, draft=models.draft or _CANDIDATES)
    told_if_greedy(given["temperature"])
    sampling, prompts = _check(given, output)
    model = models.load_target()
    found = _tune(model, models, sampling, prompts, given["max_new_tokens"], given["seed"], given["cluster"])
    if as_json:
        click.echo(json.dumps(_as_object(model, found)))
    else:
        _show(found, output)
    if output is not None:  # last, so that what was measured is told whatever becomes of the file
        write(output, found.configuration.to_toml())


def _check(given: dict[str, Any], output: Path | None) -> tuple[SamplingSettings, list[Prompt]]:
    """Refuse what can't work before a model is loaded; → settings and prompts."""
    from outrider.audit.inputs import PROMPTS
    from outrider.request.prompt_file import read_prompts
    from outrider.settings.sampling import SamplingSettings
    from outrider.settings.seed import check_seed

    sampling = SamplingSettings(**{name: given[name] for name in ("temperature", "top_k", "top_p", "min_p")})
    check_seed(given["seed"])
    if given["max_new_tokens"] < 2:
        raise ParameterError(f"max_new_tokens must be 2 or more, got {given['max_new_tokens']}: 128 tell more")
    check_file(output)
    check_other_file("output", output, given["prompts"])
    return sampling, list(PROMPTS[:8]) if given["prompts"] is None else list(read_prompts(given["prompts"]))


def _tune(
    model: TextModel,
    models: ModelChoice,
    sampling: SamplingSettings,
    texts: list[Prompt],
    tokens: int,
    seed: int,
    cluster: Cluster | None,
) -> _Found:
    from outrider.models.base import has_encoder
    from outrider.request.prompts import asked
    from outrider.tune.configuration import Configuration
    from outrider.tune.trial import Setup, overall

    drafters = {spec: models.load_one_draft(spec, model) for spec in models.draft}
    prompts = [asked(model, text) for text in texts]
    written = _write(model, models, prompts, sampling, tokens, seed, cluster)
    candidates = _predict(model, drafters, sampling, written)
    best = max(candidates, key=lambda one: one.best.speedup)
    named: dict[str, tuple[str | None, int | str]] = {"plain": (None, 0)}
    setups: dict[str, Setup] = {"plain": Setup(None, 0)}
    for name, length in ((f"{best.name}, {best.best.length}", best.best.length), (f"{best.name}, auto", "auto")):
        if length:
            named[name] = (best.name, length)
            setups[name] = Setup(drafters[best.name], None if length == "auto" else int(length))
    runs = _try(model, setups, prompts, sampling, tokens, seed)
    chosen = max(setups, key=lambda name: overall(runs, name, "plain"))
    draft, length = named[chosen]
    how = (models.dtype, models.engine, models.device, models.compile)
    configuration = Configuration(models.target or DEFAULT_MODEL, draft, length, *how)
    return _Found(candidates, runs, named, configuration, chosen, has_encoder(model))


def _write(
    model: TextModel,
    models: ModelChoice,
    prompts: list[Asked],
    sampling: SamplingSettings,
    tokens: int,
    seed: int,
    cluster: Cluster | None,
) -> list[tuple[Asked, list[int]]]:
    """The target's own texts. → prompt and new tokens of each"""
    from outrider.tune.writing import own_texts, spread_texts

    if cluster is None:
        texts = own_texts(model, prompts, sampling, tokens, seed)
    else:
        told_of_ray(cluster)
        texts = spread_texts(model, cluster, models.setup(compile=models.compile), prompts, sampling, tokens, seed)
    return list(zip(prompts, _bar(texts, "The target writes", len(prompts)), strict=True))


def _predict(
    model: TextModel,
    drafters: dict[str, Drafter],
    sampling: SamplingSettings,
    written: list[tuple[Asked, list[int]]],
) -> list[Candidate]:
    """Every candidate is held beside the target's texts, every length is predicted."""
    from outrider.costs import measured_costs
    from outrider.request.own_rules import law_along
    from outrider.request.prompts import prepare
    from outrider.tune.chances import chances
    from outrider.tune.predict import predict

    costs = measured_costs(model)
    for drafter in drafters.values():
        drafter.bind(model)
        drafter.measure()
    pairs = [(name, prompt, new) for name in drafters for prompt, new in written]
    measured: dict[str, list[Any]] = {name: [] for name in drafters}
    law = law_along(model, sampling, prepare(model, written[0][0]).tokens)
    for name, prompt, new in _bar(pairs, "Acceptance of the drafts"):
        seen = prepare(model, prompt)
        measured[name].append(chances(drafters[name], model, [*seen.tokens, *new], len(seen.tokens), law, seen.source))
    return [
        predict(name, measured[name], costs, drafter.seconds, _relative_bytes(drafter, model))
        for name, drafter in drafters.items()
    ]


def _relative_bytes(drafter: Drafter, model: TextModel) -> float:
    """ĉ: weights that a draft step reads, over the target's; nearly the ratio of operations."""
    from outrider.drafters import ModelDrafter
    from outrider.models.base import ReadsWeights

    if not isinstance(drafter, ModelDrafter):
        return 0.0
    own = drafter.model
    return (
        own.weight_bytes / model.weight_bytes if isinstance(own, ReadsWeights) and isinstance(model, ReadsWeights) else 0.0
    )


def _try(
    model: TextModel, setups: dict[str, Setup], prompts: list[Asked], sampling: SamplingSettings, tokens: int, seed: int
) -> list[Run]:
    from outrider.tune.trial import run_setups

    steps = run_setups(model, setups, prompts, sampling, tokens, seed)
    return list(_bar(steps, "Plain and predicted best, in turn", len(setups) * len(prompts)))


def _bar(items: Iterable[Any], title: str, total: int | None = None) -> Iterable[Any]:
    from rich.console import Console
    from rich.progress import track

    return track(items, title, total=total, console=Console(stderr=True), disable=not sys.stderr.isatty())


def _as_object(model: TextModel, found: _Found) -> dict[str, Any]:
    from outrider.bench.machine import machine
    from outrider.tune.trial import overall

    return {
        "target": model.name,
        "dtype": model.dtype_name,
        "candidates": [asdict(candidate) for candidate in found.candidates],
        "measured": {name: asdict(_speedup(found, name)) for name in found.setups},
        "measured_in_all": {name: overall(found.runs, name, "plain") for name in found.setups},
        "predicted": {name: _predicted(found, name) for name in found.setups},
        "chosen": found.chosen,
        "configuration": asdict(found.configuration),
        "equivalents": _equivalents(found),
        **machine(),
    }


def _speedup(found: _Found, name: str) -> Any:
    from outrider.tune.trial import speedup

    return speedup(found.runs, name, "plain")


def _predicted(found: _Found, name: str) -> float | None:
    """The predicted speed-up for a fixed length."""
    draft, length = found.setups[name]
    if draft is None or length == "auto":
        return None
    candidate = next(one for one in found.candidates if one.name == draft)
    return next(one.speedup for one in candidate.predictions if one.length == length)


def _equivalents(found: _Found) -> dict[str, str]:
    """For engines whose drafts have one length: the best one that was predicted."""
    draft, _ = found.setups[found.chosen]
    fixed = next((one.best.length for one in found.candidates if one.name == draft), 0)
    every = found.configuration.equivalents(fixed)
    return {engine: text for engine, text in every.items() if engine == "transformers" or not found.encoder}


def _show(found: _Found, output: Path | None) -> None:
    from rich.table import Table

    from outrider.cli.output import wide_console
    from outrider.request.draft_names import where_apart, without_folder
    from outrider.tune.trial import overall

    console, short = wide_console(), where_apart({one.name: without_folder(one.name) for one in found.candidates})
    table = Table("draft", "alpha", "proposes", "c", "ĉ", "best γ", "tokens/round", "speed-up", "closed form", "operations")
    for one in found.candidates:
        best = one.best
        cells = [f"{one.alpha:.3f}", f"{100 * one.coverage:.0f} %", f"{one.c:.3f}", f"{one.c_hat:.3f}", str(best.length)]
        cells += [
            f"{best.tokens_per_round:.2f}",
            f"{best.speedup:.2f}×",
            f"{best.closed_form:.2f}×",
            f"{best.operations:.2f}×",
        ]
        table.add_row(short[one.name], *cells)
    console.print(table)
    lengths = Table("predicted speed-up", *[f"γ={length}" for length in _SHOWN])
    for one in found.candidates:
        lengths.add_row(short[one.name], *[f"{one.predictions[length].speedup:.2f}" for length in _SHOWN])
    console.print(lengths)
    trials = Table("run", "speed-up, prompt by prompt", "in all", "predicted", "predicted ÷ measured")
    for name in found.setups:
        measured, predicted = _speedup(found, name), _predicted(found, name)
        whole = overall(found.runs, name, "plain")
        ratio = ["—", "—"] if predicted is None else [f"{predicted:.2f}×", f"{predicted / whole:.2f}"]
        draft, comma, length = name.rpartition(", ")
        shown = short.get(draft, draft) + comma + length
        trials.add_row(shown, f"{measured}×", f"{whole:.2f}×", *ratio)
    console.print(trials)
    console.print(f"quickest: [bold]{found.chosen}[/]")
    for engine, text in _equivalents(found).items():
        console.print(f"  {engine}: {text}", markup=False)
    if output is not None:
        console.print(f"outrider generate --config {output} PROMPT", markup=False)
