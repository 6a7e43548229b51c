"""CUDA graphs of one function: captured when it is called with the same shapes again, replayed from then on.

A graph replays the same kernels on the same memory. So what a call is about is copied into tensors of the graph's own, and
other shapes, or other memory that is read, have a graph of their own. What comes once is not worth a capture, for which the
device stands still. Where anything fails the function is called as it is, now and later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import in_one_line
from outrider.support.alone import OneAtATime

WARM_UP = 1  # calls on the side stream, where libraries make their work space; kernels were chosen by an ordinary one
MOST_GRAPHS = 32
MOST_SEEN = 512
_log = logging.getLogger(__name__)
_cuda: Any = torch.cuda  # parts of which have no types
_side_streams: dict[torch.device, Any] = {}
_capturing = OneAtATime()  # torch allows one at a time in a process
Run = Callable[[int, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Held:
    """A captured call: its own inputs and outputs. The memory that it reads is not kept alive; its key tells where it is."""

    inputs: list[Tensor]
    graph: Any
    out: tuple[Tensor, ...]


class Graphs:
    """The CUDA graphs of one function, by what it was captured with. Of those least used some are forgotten.

    run: (columns, tensors that it is about, memory that it reads and writes) → tensors. It must write the same when it is
    called twice. name: whose passes these are, for messages. warns: whether to say that there are none any more, failed: why
    there are none, empty while there are.
    """

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name
        self._held: dict[object, _Held] = {}
        self._seen: dict[object, None] = {}
        self._place: Any = None
        self._pool: Any = None
        self.warns, self.failed = True, ""
        self.captures = self.replays = 0

    def __call__(self, columns: int, about: Sequence[Tensor], memory: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the function returns; overwritten by the next call where a graph was replayed."""
        out, spent = None, False
        if not self.failed:
            try:
                out = self._by_graph(columns, about, memory)
            except torch.OutOfMemoryError:
                spent = True
                self._give_up("the device has no memory left for them")
            except Exception as error:  # models raise anything; the function is always there
                self._give_up(in_one_line(error, 200))
        if spent:  # not before: the error holds what was made so far
            _cuda.empty_cache()
        return self._run(columns, about, memory) if out is None else out

    def clear(self) -> None:
        """Forget all, and give their memory back."""
        self._held.clear()
        self._seen.clear()
        self._pool = None

    def _give_up(self, reason: str) -> None:
        self.clear()
        self.failed = reason
        if self.warns:
            say_uncaptured(self._name, reason)

    def _by_graph(self, columns: int, about: Sequence[Tensor], memory: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """None for what was not seen before."""
        key = (columns, *((one.shape, one.dtype) for one in about), *map(_where, memory))
        found = self._held.pop(key, None)
        if found is None:
            self._forget_replaced(memory)
            if key not in self._seen:
                while len(self._seen) >= MOST_SEEN:
                    del self._seen[next(iter(self._seen))]
                self._seen[key] = None
                return None
            while len(self._held) >= MOST_GRAPHS:  # before, so that the new one can have its memory
                del self._held[next(iter(self._held))]
            with _capturing.lock:
                found = self._captured(columns, about, memory)
        self._held[key] = found
        for held, given in zip(found.inputs, about, strict=True):
            held.copy_(given)
        found.graph.replay()
        self.replays += 1
        return found.out

    def _forget_replaced(self, memory: Sequence[Tensor]) -> None:
        """A cache that has grown lies elsewhere: its graphs would hold memory for nothing."""
        place = memory[0].data_ptr() - memory[0].storage_offset() * memory[0].element_size() if memory else None
        if place != self._place:
            self.clear()
            self._place = place

    def _captured(self, columns: int, about: Sequence[Tensor], memory: Sequence[Tensor]) -> _Held:
        """Record the kernels, on a stream beside the current one, as torch asks for; nothing is computed by that.

        The calls before write the same keys and values at the same positions as the one that is wanted: nothing is spoilt.
        """
        inputs = [tensor.clone() for tensor in about]
        device = inputs[0].device
        with _cuda.device(device):
            current, side = _cuda.current_stream(device), _side_stream(device)
            try:
                side.wait_stream(current)
                with _cuda.stream(side):
                    for _ in range(WARM_UP):
                        self._run(columns, inputs, memory)
                current.wait_stream(side)
                if self._pool is None:
                    self._pool = _cuda.graph_pool_handle()
                graph = _cuda.CUDAGraph()
                out = self._record(graph, side, columns, inputs, memory)
            finally:
                _cuda.set_stream(current)  # a capture that fails leaves its own
        self.captures += 1
        return _Held(inputs, graph, out)

    def _record(
        self, graph: Any, stream: Any, columns: int, inputs: Sequence[Tensor], memory: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        reason: Exception | None = None
        try:
            # Other threads may use the device meanwhile.
            with _cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    return self._run(columns, inputs, memory)
                except Exception as error:
                    reason = error
                    raise
        except Exception as error:
            if reason is None or error is reason:
                raise
            raise reason from None  # to end a capture that is broken raises another one, which tells nothing


def say_uncaptured(name: str, reason: str) -> None:
    """Warn that the passes of that name run without."""
    _log.warning("passes of %s are not captured as CUDA graphs (%s): it runs without", name, reason)


def _where(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _side_stream(device: torch.device) -> Any:
    """One for each device: what is kept for a stream, as the work space of its products, is made once."""
    if device not in _side_streams:
        _side_streams[device] = _cuda.Stream(device)
    return _side_streams[device]
