"""`lead`: where the ranks part. Rank 0 does the work, the others repeat its calls until it has ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outrider.errors import OutriderError, ParameterError
from outrider.sharded.team import Op, Team, TeamError, may_be_loss, receive, share
from outrider.sharded.watch import FollowerWatch, LeaderWatch

T = TypeVar("T")
_SECOND = 3.0  # seconds after which a rank whose connections break reports that itself
_FOR_EVER = timedelta(days=30)  # rank 0 may wait for its user; who has ended is the watch's business
_HOW = "torchrun --nproc-per-node 2 -m outrider … --tensor-parallel"


def lead(work: Callable[[Team], T]) -> T | None:
    """Called by every rank of a job of torchrun: rank 0 runs `work(team)`; the others repeat its calls on the team's models.

    → what `work` returned on rank 0, None on the others once it has ended. Raises `ParameterError` outside such a job and
    `TeamError` on rank 0 when another rank has ended; a rank other than 0 that fails, or loses rank 0, ends its process.
    """
    rank = _check_job()
    device = _join()
    if rank > 0:
        _follow(rank, device)
        return None
    watch = LeaderWatch(dist.get_world_size())
    share(watch.address)
    watch.connect()
    team = Team(device, watch)
    previous = signal.signal(signal.SIGTERM, lambda *_: _stopped(team))
    try:
        result = work(team)
        if not team.broken:
            team.tell(Op.STOP)
    except BaseException:
        team.broken = True
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        if team.broken:
            watch.end()
        else:
            watch.close()
            dist.destroy_process_group()
    return result


def _check_job() -> int:
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ParameterError(f"tensor parallelism needs a process a rank, which torchrun starts: {_HOW}")
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise ParameterError(f"tensor parallelism needs 2 or more ranks, got {os.environ['WORLD_SIZE']}: {_HOW}")
    return int(os.environ["RANK"])


def _join() -> torch.device:
    """Meet the other ranks. Commands go over gloo; on GPUs what the layers exchange goes over NCCL (not measured)."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=_FOR_EVER)
        return torch.device("cpu")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if here > torch.cuda.device_count():  # as every rank of this machine finds, rank 0 included
        raise ParameterError(
            f"tensor parallelism needs a GPU a rank, this machine has {torch.cuda.device_count()}: start fewer ranks, or "
            "set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_FOR_EVER)
    return torch.device("cuda", local)


def _stopped(team: Team) -> None:
    """SIGTERM: torchrun ends all ranks when one has ended; say which, if that is why."""
    if team.watch.reason is None and team.watch.wait(1.0) is None:
        raise TeamError("stopped by a signal (SIGTERM)")
    if not team.broken:
        team.check()


def _follow(rank: int, device: torch.device) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interruption means
    logging.disable(logging.CRITICAL)  # and says what there is to say
    warnings.simplefilter("ignore")
    watch = FollowerWatch(share(), rank)
    try:
        _repeat(device)
    except BaseException as error:
        if may_be_loss(error):
            time.sleep(_SECOND)  # another rank's end is the reason: rank 0 ends this one meanwhile
        reason = str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
        watch.fail(" ".join(reason.split())[:300])
        sys.stderr.flush()
        os._exit(1)
    watch.close()
    dist.destroy_process_group()


def _repeat(device: torch.device) -> None:
    from outrider.sharded.costs import measure_link
    from outrider.sharded.loading import load_part
    from outrider.sharded.model import Repeater

    models: dict[int, Repeater] = {}
    handlers: dict[Op, Callable[..., Any]] = {
        Op.OPEN: lambda number, *rest: models[number].open(*rest),
        Op.CLOSE: lambda number, *rest: models[number].close(*rest),
        Op.SCORE: lambda number, *rest: models[number].score(*rest),
        Op.LOAD: lambda number: models.__setitem__(number, Repeater(load_part(**share()))),
        Op.DROP: models.pop,
        Op.LINK: lambda: measure_link(device),
    }
    while True:
        op, words = receive()
        if op is Op.STOP:
            return
        handlers[op](*words)
