"""Seconds by phase, without stopping the device.

On a CPU the host's clock is read at each change of phase. On a GPU work is queued, so events are recorded in the stream
instead and read after the round's own synchronisation.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from outrider.records import PHASES


class _Phase:
    """A block of one phase. A class: it is entered five times a round and more, and a generator takes twice as long."""

    __slots__ = ("_clock", "_name", "_outer")

    def __init__(self, clock: PhaseClock, name: str) -> None:
        self._clock, self._name, self._outer = clock, name, ""

    def __enter__(self) -> None:
        self._outer = self._clock.change(self._name)

    def __exit__(self, *error: object) -> None:
        self._clock.change(self._outer)


class PhaseClock:
    """Accumulates seconds by phase; phases nest, and an inner one suspends the outer one."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._events = device is not None and device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self._phase = "other"
        self._mark()

    def _mark(self) -> None:
        if self._events:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((self._phase, event))
        else:
            self._marks.append((self._phase, time.perf_counter()))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time inside the block as `name`, one of `PHASES`."""
        return _Phase(self, name)

    def change(self, name: str) -> str:
        """Count what comes from now on as that phase. → the one before"""
        before, self._phase = self._phase, name
        self._mark()
        return before

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last `take`. On a GPU, call it after a synchronisation."""
        self._mark()
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(start, float) and isinstance(end, float):
                seconds[phase] += end - start
            elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                end.synchronize()
                seconds[phase] += start.elapsed_time(end) / 1000.0
        self._marks = [(self._phase, self._marks[-1][1])]
        return seconds
