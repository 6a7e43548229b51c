"""Where slow function and consumer run: threads or processes of `concurrent.futures`, with work that can be told to stop.

Queued work that is no longer wanted never starts. A Python function that runs can't be stopped from outside, so a consumer
may ask `Context.cancelled()` from time to time and return early. Worker processes get the two functions once, when they
start, and not with each call. Nothing here imports torch, so that starting a process stays quick.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import OutriderError, ParameterError

KINDS = ("threads", "processes")
_SLOTS = 1 << 16  # flags to cancel by, used in turn: far more than jobs that are alive at a time
_START_SECONDS = 300.0


@dataclass(frozen=True)
class Context:
    """What a consumer may ask for. rng: randomness of its own for this run. cancelled: whether it is no longer wanted."""

    rng: np.random.Generator
    cancelled: Callable[[], bool]


def generator(seed: int, *key: int) -> np.random.Generator:
    """Independent numbers for each key (Philox, counter-based)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


@dataclass(frozen=True)
class Functions:
    """Both functions, and a flag for each job: 1 once it is unwanted."""

    slow: Callable[[Any], Any]
    consume: Callable[..., Any]
    with_context: bool
    flags: Any

    def run_slow(self, x: Any) -> tuple[Any, float]:
        """→ the law, seconds"""
        start = time.perf_counter()
        return self.slow(x), time.perf_counter() - start

    def run_consume(self, x: Any, sample: Any, noise: tuple[int, ...], slot: int) -> tuple[Any, float]:
        """→ the value, seconds. noise: seed and key of the consumer's own randomness"""
        start = time.perf_counter()
        if not self.with_context:
            return self.consume(x, sample), time.perf_counter() - start
        context = Context(generator(*noise), lambda: bool(self.flags[slot]))
        return self.consume(x, sample, context), time.perf_counter() - start


class Job:
    """Work that was handed out."""

    def __init__(self, future: Future[tuple[Any, float]], flags: Any = None, slot: int = 0) -> None:
        self.future = future
        self._flags = flags
        self._slot = slot

    def result(self) -> tuple[Any, float]:
        """Wait for it. → what it gave, seconds; raises what it raised"""
        try:
            return self.future.result()
        except (BrokenProcessPool, CancelledError) as error:
            raise OutriderError(f"a worker process ended before its work was done ({error})") from error

    def failed(self) -> bool:
        """Whether it has ended without a result."""
        return self.future.done() and (self.future.cancelled() or self.future.exception() is not None)

    def cancel(self) -> None:
        """Not wanted any more: whatever it gives or raises is dropped."""
        if not self.future.cancel() and self._flags is not None:
            self._flags[self._slot] = 1


class Workers:
    """kind: "threads" or "processes". count: how many. Started with the first job."""

    def __init__(
        self, slow: Callable[[Any], Any], consume: Callable[..., Any], with_context: bool, kind: str, count: int
    ) -> None:
        if kind not in KINDS:
            raise ParameterError(f"workers must be one of {', '.join(KINDS)}, got {kind!r}")
        processes = kind == "processes"
        # Not forked: torch's threads do not survive that.
        self._processes = multiprocessing.get_context("spawn") if processes else None
        flags = self._processes.RawArray("b", _SLOTS) if self._processes else bytearray(_SLOTS)
        self.functions = Functions(slow, consume, with_context, flags)
        if processes:
            _check_pickles(slow, consume)
        self._count = count
        self._executor: Executor | None = None
        self._closed = False
        self._slot = 0

    def start(self) -> None:
        """Have all workers running."""
        if self._executor is not None:
            return
        if self._closed:
            raise ParameterError("this speculation is closed: make another one")
        if self._processes is None:
            self._executor = ThreadPoolExecutor(self._count, "outrider-speculate")
            return
        meeting = self._processes.Barrier(self._count)
        given = (self.functions, meeting)
        executor = ProcessPoolExecutor(self._count, self._processes, initializer=_begin, initargs=given)
        try:
            for one in [executor.submit(_meet) for _ in range(self._count)]:
                one.result()
        except BaseException as error:
            executor.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise OutriderError(
                    "worker processes could not be started: the program's own work must be under "
                    "`if __name__ == '__main__':`, and the functions importable"
                ) from error
            raise
        self._executor = executor

    def slow(self, x: Any) -> Job:
        """Start the slow function on x."""
        return Job(self._submit(self.functions.run_slow, _run_slow, x))

    def consume(self, x: Any, sample: Any, noise: tuple[int, ...]) -> Job:
        """Start the consumer. noise: seed and key of its own randomness."""
        self._slot = (self._slot + 1) % _SLOTS
        self.functions.flags[self._slot] = 0
        future = self._submit(self.functions.run_consume, _run_consume, x, sample, noise, self._slot)
        return Job(future, self.functions.flags, self._slot)

    def _submit(self, here: Callable[..., Any], there: Callable[..., Any], *given: Any) -> Future[tuple[Any, float]]:
        self.start()
        assert self._executor is not None
        try:
            return self._executor.submit(there if self._processes else here, *given)
        except BrokenProcessPool as error:
            raise OutriderError(f"a worker process has ended: {error}") from error

    def close(self) -> None:
        """Start nothing more. Work that runs in a thread is left to end by itself."""
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=self._processes is not None, cancel_futures=True)
            self._executor = None


def wait_for_any(jobs: list[Job]) -> None:
    """Until one of them has ended."""
    wait([job.future for job in jobs], return_when="FIRST_COMPLETED")


def _check_pickles(*functions: Callable[..., Any]) -> None:
    for one in functions:
        try:
            pickle.dumps(one)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ParameterError(
                f"with workers='processes' slow and consume must be functions of a module, got {one!r}: {error}"
            ) from None


_held: list[Any] = []  # in a worker process: its functions, and where all workers meet once


def _begin(functions: Functions, meeting: Any) -> None:
    _held[:] = [functions, meeting]


def _meet() -> None:
    _held[1].wait(_START_SECONDS)


def _run_slow(x: Any) -> tuple[Any, float]:
    return _sendable(_held[0].run_slow, x)


def _run_consume(*given: Any) -> tuple[Any, float]:
    return _sendable(_held[0].run_consume, *given)


def _sendable(function: Callable[..., tuple[Any, float]], *given: Any) -> tuple[Any, float]:
    """Run it; an exception that can't be sent to the caller would end the whole pool, so its text is sent instead."""
    try:
        return function(*given)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise OutriderError(f"{type(error).__name__}: {error}") from None
        raise
