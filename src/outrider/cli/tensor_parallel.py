"""`--tensor-parallel`: the models of a command over the ranks that torchrun has started. Rank 0 runs the command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.cli.models import ModelChoice
    from outrider.drafters import Drafter
    from outrider.models.base import TextModel
    from outrider.sharded.costs import Share
    from outrider.sharded.model import TeamModel

_PLACEMENT = (
    "With --tensor-parallel, where a draft model is computed; auto: where a token is measured to cost least  [default: auto]"
)
_PLACES = ("auto", "sharded", "replicated", "rank0")


def tensor_parallel_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --tensor-parallel and --draft-placement to a command with the options of models (`model_options` goes above)."""

    @wraps(command)
    def on_ranks(models: ModelChoice, tensor_parallel: bool, draft_placement: str | None, **given: Any) -> Any:
        if not tensor_parallel:
            _check_unused(draft_placement, _job_size())
            return command(models=models, **given)
        if models.device != "auto":
            raise ParameterError(
                f"device must be auto with --tensor-parallel, got {models.device!r}: each rank takes the GPU of its number, "
                "or the CPU where there is none (CUDA_VISIBLE_DEVICES= hides GPUs)"
            )
        _check_placed(draft_placement, models.draft, bool(given.get("plain")))
        from outrider.sharded import lead

        placement = draft_placement or "auto"
        context = click.get_current_context()

        def work(team: Any) -> Any:
            with context.scope(cleanup=False):
                return command(models=replace(models, team=team, placement=placement), **given)

        return lead(work)

    on_placement = click.option("--draft-placement", type=click.Choice(_PLACES), help=_PLACEMENT)
    help_text = "Shard the target over the ranks that torchrun starts (docs/sharded.md)."
    return click.option("--tensor-parallel", is_flag=True, help=help_text)(on_placement(on_ranks))


def _job_size() -> int:
    """How many processes torchrun has started, 1 outside it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def _check_unused(placement: str | None, ranks: int) -> None:
    if placement is not None:
        raise click.UsageError("--draft-placement is for --tensor-parallel: give both, or leave it out")
    if ranks > 1:
        raise click.UsageError(f"torchrun has started {ranks} processes that would all do the same: add --tensor-parallel")


def _check_placed(placement: str | None, drafts: tuple[str, ...], plain: bool) -> None:
    from outrider.request.draft_specs import is_named

    if placement is not None and (plain or all(is_named(spec) for spec in drafts)):
        raise click.UsageError("--draft-placement is for a draft model: name one with --draft, or leave it out")


def count_traffic(target: TextModel, draft: Drafter | None) -> list[TeamModel]:
    """The models that several ranks compute, from now on counting what their passes are spent on."""
    from outrider.drafters import ModelDrafter
    from outrider.sharded.model import TeamModel

    parts = draft.parts() if draft is not None else []
    models = [target, *(part.model for part in parts if isinstance(part, ModelDrafter) and hasattr(part, "model"))]
    found = list({id(model): model for model in models if isinstance(model, TeamModel)}.values())
    for model in found:
        model.reset()
    return found


def shares_of(models: list[TeamModel]) -> list[Share]:
    """What they were spent on, beside what was predicted and, if it was measured, beside one process."""
    if not models:
        return []
    from outrider.costs import kept_costs
    from outrider.sharded.costs import share_of

    in_step = [model for model in models if not model.team.broken]  # after an interruption nothing more can be measured
    return [share_of(model, kept_costs(model.engine)) for model in in_step]


def show_shares(shares: list[Share]) -> None:
    """A few lines on standard error."""
    for share in shares:
        click.echo(f"{share.model}, {share.placement} on {share.ranks} ranks: {share.milliseconds:.2f} ms a pass", err=True)
        measured = "not measured on a GPU" if share.communication is None else f"{share.communication:.2f} ms measured"
        compute = "" if share.compute is None else f", {share.compute:.2f} ms compute"
        click.echo(
            f"  communication {measured}, {share.predicted:.2f} predicted ({share.collectives:.0f} collective calls a pass, "
            f"{100 * share.shared_weights:.0f} % of the weights shared out){compute}",
            err=True,
        )
        if share.alone is None:
            click.echo("  one process: not measured with as many threads (outrider calibrate measures it)", err=True)
        else:
            click.echo(
                f"  one process: {share.alone:.2f} ms a pass, from which {share.predicted_pass:.2f} ms are predicted "
                f"({share.fixed:.2f} ms of it not shared; weights {share.company:.2f} times as long while all ranks read)",
                err=True,
            )
