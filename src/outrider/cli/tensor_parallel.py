"""`--tensor-parallel`: the models of a command over the ranks that torchrun has started. Rank 0 runs the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.cli.models import ModelChoice

_PLACEMENT = (
    "With --tensor-parallel, where a draft model is computed: sharded, replicated, rank0, or auto: where a token is measured "
    "to cost least."
)


def tensor_parallel_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --tensor-parallel and --draft-placement to a command with the options of models (`model_options` goes above)."""

    @wraps(command)
    def on_ranks(models: ModelChoice, tensor_parallel: bool, draft_placement: str | None, **given: Any) -> Any:
        from outrider.sharded.start import job_size, lead

        if not tensor_parallel:
            _check_unused(draft_placement, job_size())
            return command(models=models, **given)
        if models.device not in ("auto",):
            raise ParameterError(
                f"device must be auto with --tensor-parallel, got {models.device!r}: each rank takes the GPU of its number, or "
                "the CPU where there is none (CUDA_VISIBLE_DEVICES= hides GPUs)"
            )
        placement = draft_placement or "auto"
        context = click.get_current_context()

        def work(team: Any) -> Any:
            with context.scope(cleanup=False):
                return command(models=replace(models, team=team, placement=placement), **given)

        return lead(work)

    on_placement = click.option("--draft-placement", metavar="WHERE", help=_PLACEMENT)
    help_text = "Shard the target over the ranks that torchrun starts (docs/sharded.md)."
    return click.option("--tensor-parallel", is_flag=True, help=help_text)(on_placement(on_ranks))


def _check_unused(placement: str | None, ranks: int) -> None:
    if placement is not None:
        raise click.UsageError("--draft-placement is for --tensor-parallel: give both, or leave it out")
    if ranks > 1:
        raise click.UsageError(f"torchrun has started {ranks} processes that would all do the same: add --tensor-parallel")
