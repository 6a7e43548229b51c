"""The same prompts over the devices of a Ray cluster: a process ("actor") per device, each with its own continuous batch.

An actor never holds more prompts than its batch and a few that wait beside it, and the file is read no faster than that. A
prompt belongs to an actor until its record has come back; if the actor dies before, its prompts go to the others and to a
new actor in its place. A prompt's output does not depend on where it is computed, so doing it again changes nothing, and a
record is written by this process alone, so none is written twice.

The cost tables that the draft lengths follow from are measured by the first actor and hold for all, also on other machines.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from outrider.batch.job_batch import JobBatch, Record
from outrider.batch.jobs import Job
from outrider.batch.run import KeepTables
from outrider.batch.setup import Setup
from outrider.errors import ModelError, OutriderError, ParameterError, in_one_line
from outrider.support.optional import require

_log = logging.getLogger(__name__)
PATIENCE = 5.0  # seconds without an answer before the cluster is looked at
DEATHS = 3  # of actors in a row, with nothing finished between: then it is no accident


@dataclass(frozen=True)
class Cluster:
    """Where. address: of a running cluster, None: one is started for this run. actors: None for one per device."""

    address: str | None = None
    actors: int | None = None


@dataclass(frozen=True)
class Share:
    """What every actor gets of a cluster, and how many of them there are."""

    actors: int
    cpus: int
    gpus: int


def check_installed() -> None:
    """Raise `MissingPackageError` unless Ray can be imported."""
    require("ray", "--ray", "leave it out")


class Worker:
    """What runs in an actor."""

    def __init__(self, setup: Setup, folder: str, threads: int) -> None:
        import torch

        if os.path.isdir(folder):
            os.chdir(folder)  # models may be named by relative paths
        torch.set_num_threads(threads)
        self._setup = setup
        self._batch: JobBatch | None = None

    def load(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Load the models. → the cost tables"""
        ready = self._setup.load(tables)
        self._batch = JobBatch(ready, self._setup.batch_size)
        return ready.tables

    def work(self, jobs: list[Job]) -> list[Record]:
        """Take further jobs and go on until some have ended. → their records, none if nothing is left"""
        assert self._batch is not None
        self._batch.put(jobs)
        ended: list[Record] = []
        while not ended and self._batch.load:
            ended = self._batch.advance()
        return ended


@dataclass
class _Actor:
    """An actor and the prompts that it has."""

    handle: Any
    has: dict[int, Job] = field(default_factory=dict)


class RayPool:
    """An `Executor` over a cluster. actors: those that live."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._actors: list[_Actor] = []

    def __call__(self, setup: Setup, jobs: Iterator[Job], tables: Mapping[str, Any], keep: KeepTables) -> Generator[Record]:
        import ray

        with redirect_stdout(sys.stderr):  # Ray tells there of processes that died, where results belong
            _connect(self.cluster.address)
            try:
                share = share_of(self.cluster, setup.device, ray.cluster_resources(), len(ray.nodes()))
                yield from _Run(self, setup, share, jobs).records(tables, keep)
            finally:
                self._actors.clear()
                ray.shutdown()


class _Run:
    """One run: which prompts are where."""

    def __init__(self, pool: RayPool, setup: Setup, share: Share, jobs: Iterator[Job]) -> None:
        self._pool, self._setup, self._share = pool, setup, share
        self._jobs = jobs
        self._again: deque[Job] = deque()
        self._calls: dict[Any, _Actor] = {}
        self._tables: Mapping[str, Any] = {}
        self._deaths = 0

    def records(self, tables: Mapping[str, Any], keep: KeepTables) -> Generator[Record]:
        """Load one actor, which measures what is not measured yet, then the others, and keep all of them at work."""
        self._tables = tables
        self._start()
        while not self._tables:
            for call in self._finished():
                self._tables = self._answer(call) or {}
                if self._tables:
                    self._call(self._pool._actors[0])
        keep(self._tables)
        for _ in range(self._share.actors - len(self._pool._actors)):
            self._start()
        while self._calls:
            for call in self._finished():
                actor = self._calls[call]
                answer = self._answer(call)
                if answer is None:
                    continue
                ended = answer if isinstance(answer, list) else []
                for record in ended:
                    actor.has.pop(record["index"])
                    self._deaths = 0
                self._call(actor)  # first the next work, then the results
                yield from ended

    def _finished(self) -> list[Any]:
        """The calls that have returned; waits for one."""
        import ray

        while True:
            done, _ = ray.wait(list(self._calls), num_returns=1, timeout=PATIENCE)
            if done:
                return list(done)
            if not any(node["Alive"] for node in ray.nodes()):  # new actors would wait for a place for ever
                raise ModelError("the Ray cluster has no machine left that is alive: run the command again, on a new one")

    def _start(self) -> None:
        """A new actor, which loads its models."""
        import ray

        share = self._share
        remote = ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=0)(Worker)
        setup = replace(self._setup, device="cuda") if share.gpus else self._setup  # an actor sees its own GPU alone
        actor = _Actor(remote.remote(setup, os.getcwd(), threads_of(share)))
        self._pool._actors.append(actor)
        self._calls[actor.handle.load.remote(dict(self._tables))] = actor

    def _answer(self, call: Any) -> Any:
        """What a call returned, and None if its actor has died; another one is then started."""
        import ray

        actor = self._calls.pop(call)
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OutriderError):
                raise type(error.cause)(*error.cause.args) from None
            raise
        except (
            ray.exceptions.RayActorError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.OutOfMemoryError,
            ray.exceptions.ObjectLostError,
        ) as error:
            self._bury(actor, error)
            return None

    def _bury(self, actor: _Actor, error: Exception) -> None:
        self._pool._actors.remove(actor)
        self._deaths += 1
        _log.warning("a Ray actor died: its %d prompts are computed again", len(actor.has))
        self._again.extend(actor.has[index] for index in sorted(actor.has))
        if self._deaths >= DEATHS * self._share.actors:
            reason = in_one_line(error, 200)
            raise ModelError(f"{self._deaths} Ray actors died with nothing finished between, the last one so: {reason}")
        self._start()

    def _call(self, actor: _Actor) -> None:
        """Fill an actor up, and let it go on if it has anything."""
        room = self._setup.batch_size + _spare(self._setup.batch_size) - len(actor.has)
        new = [self._again.popleft() for _ in range(min(room, len(self._again)))]
        new += islice(self._jobs, room - len(new))
        actor.has.update((job.index, job) for job in new)
        if actor.has:
            self._calls[actor.handle.work.remote(new)] = actor


def _spare(batch_size: int) -> int:
    """Prompts that wait beside a batch, so that a place is taken before this process has heard of it."""
    return max(1, batch_size // 4)


def finished(cluster: Cluster, setup: Setup, jobs: Iterator[Job], failed: Callable[[Record], str]) -> Generator[Record]:
    """The records of a run that is made in one go, as they come: its cost tables are not kept.

    failed: says what could not be done, of a record with an error. Raises `ModelError` for that.
    """
    with closing(RayPool(cluster)(setup, jobs, {}, _forget_tables)) as records:
        for record in records:
            if "error" in record:
                raise ModelError(f"{failed(record)}: {record['error']}")
            yield record


def in_order(records: Iterable[Record], first: int = 0) -> Iterator[Record]:
    """By their index, from `first` on. What comes too early waits, which is little where texts are of one length."""
    early: dict[int, Record] = {}
    for record in records:
        early[record["index"]] = record
        while first in early:
            yield early.pop(first)
            first += 1


def _forget_tables(tables: Mapping[str, Any]) -> None:
    del tables


def share_of(cluster: Cluster, device: str, resources: Mapping[str, float], machines: int) -> Share:
    """What the actors get. resources: of the whole cluster, as Ray counts them.

    With GPUs: one each, as many actors as there are. Without: one actor per machine, and all processors among them.
    """
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    if device.startswith("cuda") and not gpus:
        raise ParameterError("device is cuda, but the Ray cluster has no GPU: use --device cpu")
    if gpus and device != "cpu":
        actors = cluster.actors or gpus
        if actors > gpus:
            raise ParameterError(f"actors must be in 1 … {gpus}, the GPUs of the cluster, got {actors}")
        return Share(actors, min(1, cpus // actors), 1)
    actors = cluster.actors or max(1, machines)
    if actors > cpus:
        raise ParameterError(f"actors must be in 1 … {cpus}, the processors of the cluster, got {actors}")
    return Share(actors, cpus // actors, 0)


def threads_of(share: Share) -> int:
    """Threads of an actor: its processors, or fewer if OMP_NUM_THREADS says so to this process (Ray sets it for actors)."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(share.cpus, int(asked)) if asked.isdigit() else share.cpus)


def _connect(address: str | None) -> None:
    """Join the cluster, or start one on this machine."""
    import ray

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address is None:
            ray.init(address="local", include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = in_one_line(error, 200)
        raise ParameterError(f"ray can't be reached at {address or 'a cluster of its own'}: {reason}") from None
