"""`outrider calibrate`: what a pass costs by the number of tokens it scores."""

from __future__ import annotations

import json
import time

import click

from outrider.cli.models import ModelChoice, model_options_with_one_draft
from outrider.cli.shared_options import json_option
from outrider.cli.tensor_parallel import tensor_parallel_options


@click.command()
@model_options_with_one_draft
@tensor_parallel_options
@json_option
def calibrate(models: ModelChoice, as_json: bool) -> None:
    """Measure the seconds to score n new tokens with the target, and to draft one."""
    model = models.load_target()
    from outrider.costs import forget_costs, measured_costs
    from outrider.drafters import Drafter

    drafter = models.load_draft(model)
    drafter.bind(model)
    for engine in (model, *drafter.engines()):
        forget_costs(engine)
    started = time.perf_counter()
    drafter.measure()
    costs = measured_costs(model)
    took = time.perf_counter() - started
    steps = drafter.part_seconds()
    assumed = {part.name for part in drafter.parts() if type(part).measure is Drafter.measure}
    if as_json:
        each, first = {name: by.token for name, by in steps.items()}, {name: by.start for name, by in steps.items()}
        seconds, start = (next(iter(held.values())) if len(held) == 1 else held for held in (each, first))
        about = {
            "verify_seconds": {n: costs.verify(n) for n in costs.verify_seconds},
            "draft_seconds": seconds,
            "draft_start_seconds": start,
            "draft_seconds_assumed": sorted(assumed),
            "context": costs.context,
        }
        further = {"verify_seconds_per_context_token": dict(costs.per_token), "change_seconds": costs.change}
        further |= {"measuring_seconds": took}
        click.echo(json.dumps({**about, **further}))
        return
    one = costs.verify(1)
    contexts = [costs.context, *((1024, 4096) if costs.per_token else ())]
    click.echo(f"{model.name}: milliseconds to score n new tokens after a context (scored as how many)")
    click.echo("   n" + "".join(f"{context:>18,}" for context in contexts))
    for n in sorted(costs.verify_seconds):
        cells = [f"{1000 * costs.verify(n, context):11.2f} ({costs.width(n, context):3d})" for context in contexts]
        click.echo(f"{n:4d}" + "".join(f"{cell:>18s}" for cell in cells))
    if costs.change:
        click.echo(f"a pass of another width than the one before: {1000 * costs.change:.2f} ms more")
    for name, taken in steps.items():
        before = f", {1000 * taken.start:.2f} ms more for the first of a round" if taken.start else ""
        how = " (assumed; outrider bench copying measures it)" if name in assumed else ""
        click.echo(f"draft {name}: {1000 * taken.token:.2f} ms a token, c = {taken.token / one:.3f}{before}{how}")
    click.echo(f"measured in {took:.1f} s")
