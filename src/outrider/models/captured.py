"""A compiled pass as a CUDA graph: one launch instead of one a kernel. Not measured: written without a CUDA device.

A graph replays the same kernels on the same memory, so tokens and positions are copied into tensors of its own, and a graph
is captured anew when the row or the number of columns is another one. Columns are read in powers of two for that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.models.tracing import STEP

MIN_COLUMNS = 256
WARM_UP = 3


class Captured:
    """The same pass; what it returns is overwritten by the next call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._key: tuple[int, ...] = ()
        self._replay: Callable[[], object] = lambda: None
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._out: Any = None

    def __call__(self, columns: int, capacity: int, tokens: Tensor, at: Tensor, *flat: Tensor) -> Any:
        columns = min(capacity // STEP * STEP, max(MIN_COLUMNS, 1 << (columns - 1).bit_length()))
        key = (columns, capacity, *(tensor.data_ptr() for tensor in flat))
        if key != self._key:
            self._capture(columns, capacity, tokens, at, flat)
            self._key = key
        assert self._inputs is not None
        for held, given in zip(self._inputs, (tokens, at), strict=True):
            held.copy_(given)
        self._replay()
        return self._out

    def _capture(self, columns: int, capacity: int, tokens: Tensor, at: Tensor, flat: tuple[Tensor, ...]) -> None:
        """Record the kernels of a pass; it is run a few times before, on another stream, as torch asks for.

        These write the same keys and values at the same positions as the pass that is wanted, so nothing is spoilt.
        """
        self._inputs = (tokens.clone(), at.clone())
        cuda: Any = torch.cuda
        stream = cuda.Stream(tokens.device)
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run(columns, capacity, *self._inputs, *flat)
        torch.cuda.current_stream(tokens.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._out = self._run(columns, capacity, *self._inputs, *flat)
        self._replay = graph.replay
