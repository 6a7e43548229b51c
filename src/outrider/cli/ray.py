"""--ray and --actors, the same for every command whose work can be spread over processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from outrider.cli.shared_options import add_options
from outrider.errors import ParameterError

if TYPE_CHECKING:
    from outrider.batch.ray_pool import Cluster

HERE = "here"
_OPTIONS = (
    click.option(
        "--ray",
        "address",
        is_flag=False,
        flag_value=HERE,
        default=None,
        metavar="[ADDRESS]",
        help="Spread the prompts over the devices of a Ray cluster: the one at ADDRESS (auto: the one that runs here), or "
        "one started for this command.",
    ),
    click.option("--actors", type=int, help="Processes on Ray  [default: one per GPU, or per machine without GPUs]"),
)


def told_of_ray(cluster: Cluster) -> None:
    """Say on standard error what the next seconds are spent on, before it is begun."""
    where = "starting Ray on this machine" if cluster.address is None else f"joining the Ray cluster at {cluster.address}"
    click.echo(f"outrider: {where} …", err=True)


def ray_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add them; the command gets `cluster`, None without --ray."""

    @wraps(command)
    def with_cluster(address: str | None, actors: int | None, **given: Any) -> Any:
        if address is None and actors is not None:
            raise click.UsageError("--actors belongs to --ray: give that, too")
        if actors is not None and actors < 1:
            raise ParameterError(f"actors must be 1 or more, got {actors}")
        if address is None:
            return command(cluster=None, **given)
        from outrider.batch.ray_pool import Cluster, check_installed

        check_installed()
        return command(cluster=Cluster(None if address == HERE else address, actors), **given)

    return add_options(with_cluster, _OPTIONS)
