"""Streams, events and captured graphs of the simulated GPU (`simulated_gpu`).

A capture only records: what the host computes meanwhile, to know shapes, is undone, and the graph's own memory filled with
what no program expects. Kernels launched on another stream than the one that is captured are not part of the graph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0
        self.timed = enable_timing

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later._at - self._at)


class Stream:
    """`torch.cuda.Stream`, of the current device unless it is told another."""

    gpu: Any = None
    made = 0

    def __init__(self, device: Any = None) -> None:
        Stream.made += 1
        self.device = streams.device if device is None else torch.device(device)

    def wait_stream(self, other: Stream) -> None:
        del other

    def synchronize(self) -> None:
        self.gpu.wait("stream.synchronize")


class Streams:
    """The current device, and the current stream of each."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._current: dict[torch.device, Stream] = {}

    def current(self, device: Any = None) -> Stream:
        place = self.device if device is None else torch.device(device)
        if place not in self._current:
            self._current[place] = Stream(place)
        return self._current[place]

    def set(self, stream: Stream) -> None:
        self.device = stream.device
        self._current[stream.device] = stream

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`."""
        before, self.device = self.device, torch.device(device)
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        device, before = self.device, self.current(stream.device)
        self.set(stream)
        try:
            yield
        finally:
            self.set(before)
            self.device = device


streams = Streams()


class Graph:
    """`torch.cuda.CUDAGraph`: the operations with the memory that they read and wrote."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: dict[int, Tensor] = {}  # by their memory, what is the graph's own
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # other memory that it wrote to, and what that held
        self.stream: Stream | None = None
        self.broken = False

    def about_to(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what an operation is about to overwrite."""
        arguments = func._schema.arguments
        named = [(one, args[i] if i < len(args) else kwargs.get(one.name)) for i, one in enumerate(arguments)]
        for one, tensor in named:
            if isinstance(tensor, Tensor) and one.alias_info is not None and one.alias_info.is_write:
                where = _memory(tensor)
                if where not in self._made and where not in self._before:
                    whole = _whole(tensor)
                    self._before[where] = whole, whole.clone()

    def add(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """One that was run."""
        known = {_memory(one) for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)}
        for tensor in tree_flatten(made)[0]:
            if isinstance(tensor, Tensor) and _memory(tensor) not in known:
                self._made.setdefault(_memory(tensor), tensor)
        self._calls.append((func, args, kwargs, made))

    def end(self) -> None:
        """Nothing was computed."""
        for whole, held in self._before.values():
            whole.copy_(held)
        for tensor in self._made.values():
            whole = _whole(tensor)
            whole.fill_(float("nan") if whole.is_floating_point() else whole.dtype != torch.bool and 77)

    @property
    def launches(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """All of it, in the same memory."""
        for func, args, kwargs, made in self._calls:
            new = tree_flatten(func(*args, **kwargs))[0]
            for before, now in zip(tree_flatten(made)[0], new, strict=True):
                if isinstance(before, Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor lies in."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


class Capture:
    """`torch.cuda.graph`. As there, ending a broken capture raises, and leaves its stream the current one."""

    gpu: Any = None
    default_stream: Stream | None = None

    def __init__(
        self, graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        del pool
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        if stream is None and Capture.default_stream is None:
            Capture.default_stream = Stream()
        self._graph, self._stream = graph, stream or Capture.default_stream

    def __enter__(self) -> None:
        assert self.gpu.graph is None
        assert self._stream is not None
        self.gpu.wait("capture")
        self._on = streams.on(self._stream)
        self._on.__enter__()
        self._graph.stream, self.gpu.graph = self._stream, self._graph

    def __exit__(self, *args: Any) -> None:
        self.gpu.graph = None
        self._graph.end()
        if self._graph.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._on.__exit__(*args)
