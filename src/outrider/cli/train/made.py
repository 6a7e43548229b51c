"""What `outrider train head`, `blocks` and `student` end with: the draft's name for --draft, its card, the last words."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.cli.models import ModelChoice
    from outrider.models.base import TextModel
    from outrider.train.make import Data
    from outrider.train.run import Report


@dataclass(frozen=True)
class Made:
    """use: its name for --draft. what: in words, for the card. tokens: of its own vocabulary, None for the target's.

    blocks: that one pass drafts, None if a pass drafts one token. start: the head that was gone on from, if one was.
    """

    use: str
    what: str
    tokens: int | None = None
    blocks: int | None = None
    start: Path | None = None


def as_head(output: Path) -> str:
    """What names the head in a folder to --draft. Raises `ParameterError` if nothing can."""
    if "," in str(output):
        raise ParameterError(f"output of a head must have no comma in its name, for --draft head:path=…, got {output}")
    return f"head:path={output}"


def as_model(output: Path) -> str:
    """The same for a model: a path, even where a drafter has that name."""
    from outrider.request.draft_specs import is_named

    return f"./{output}" if is_named(str(output)) else str(output)


def finish(target: TextModel, models: ModelChoice, data: Data, given: dict[str, Any], report: Report, made: Made) -> None:
    """The card, and what is said at the end; by one process of several. models: how both are loaded."""
    from outrider.train.run import processes

    if not processes().is_main_process:
        return
    from outrider.bench.machine import machine
    from outrider.costs import measured_costs
    from outrider.train.card import LONGEST, predicted_speedup, write_card
    from outrider.train.corpus import parse_source

    drafter = replace(models, draft=(made.use,)).load_draft(target)
    drafter.bind(target)
    drafter.measure()
    costs, drafting = measured_costs(target), drafter.seconds
    longest = made.blocks or LONGEST
    best = {name: predicted_speedup(result["alpha"], costs, drafting, longest) for name, result in report.held_out.items()}
    step = drafting.of(longest) / longest if made.blocks else drafting.token
    card: dict[str, Any] = {
        "target": target.name, "what": made.what, "use": made.use, "start": None if made.start is None else str(made.start),
        "steps": report.steps, "finished": report.finished,
        "seconds": round(report.seconds), "batch_size": given["batch_size"], "loss": given["loss"], "seed": given["seed"],
        "learning_rate": given["learning_rate"], "length": given["length"], "windows": len(data.train),
        "data": {source.name: source.limit for source in map(parse_source, given["data"])},
        "held_out": report.held_out, "blocks": made.blocks,
        "match_is_lower_bound": made.tokens is not None and made.tokens < target.vocab_size,
        "step_seconds": step, "c": step / costs.verify(1),
        "predicted": {name: {"length": length, "speedup": speedup} for name, (length, speedup) in best.items()},
        "machine": machine()["processor"] or "this machine", "licence": given["licence"],
    }  # fmt: skip
    write_card(given["output"], card)
    if given["as_json"]:
        click.echo(json.dumps({**card, "output": str(given["output"])}))
        return
    for name, result in report.held_out.items():
        alphas = ", ".join(f"{alpha:.3f}" for alpha in result["alpha"])
        click.echo(f"{name}: alpha {alphas} by depth; predicted {best[name][1]:.2f} times as fast at length {best[name][0]}")
    ended = "" if report.finished else f" (stopped after {report.steps} of {given['steps']} steps: go on with --resume)"
    click.echo(f"{given['output']}{ended}: use it with --draft {made.use}")
