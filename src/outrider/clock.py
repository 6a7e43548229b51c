"""Seconds by phase, without stopping the device.

On a CPU the host's clock is read at each change of phase. On a GPU work is queued, so events are recorded in the stream
instead and read after the round's own synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from outrider.records import PHASES


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

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block as `name`, one of `PHASES`."""
        outer = self._phase
        self._phase = name
        self._mark()
        try:
            yield
        finally:
            self._phase = outer
            self._mark()

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
