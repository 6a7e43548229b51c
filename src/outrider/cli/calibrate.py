"""`outrider calibrate`: what a pass costs by the number of tokens it scores."""

from __future__ import annotations

import json

import click

from outrider.cli.models import load_draft, load_target, model_options


@click.command()
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(target: str | None, draft: str, dtype: str, device: str, as_json: bool) -> None:
    """Measure the seconds to score n new tokens with the target, and to draft one."""
    from outrider.choices import make_drafter
    from outrider.costs import Costs, time_pair
    from outrider.drafters import ModelDrafter

    model = load_target(target, dtype, device)
    drafter = make_drafter(load_draft(draft, dtype, device))
    if drafter is not None:
        drafter.check(model)
    costs: Costs = time_pair(model, drafter.model if isinstance(drafter, ModelDrafter) else None)
    if as_json:
        click.echo(json.dumps({"verify_seconds": dict(costs.verify_seconds), "draft_seconds": costs.draft_seconds}))
        return
    one = costs.verify(1)
    click.echo(f"{model.name}: seconds to score n new tokens, and relative to one")
    for n, seconds in sorted(costs.verify_seconds.items()):
        click.echo(f"{n:4d}  {1000 * seconds:8.2f} ms  {seconds / one:5.2f}")
    click.echo(f"draft {1000 * costs.draft_seconds:8.2f} ms a token, c = {costs.draft_seconds / one:.3f}")
