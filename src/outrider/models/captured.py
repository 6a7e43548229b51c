"""Passes as CUDA graphs: one launch instead of a thousand. Never run on a GPU yet: tried on a simulated one (tests).

A graph replays the same kernels on the same memory. So what a pass is about is copied into tensors of the graph's own, keys
and values are written at positions that are a tensor, and other rows, widths, or numbers of columns that are read have a
graph of their own. Columns are read in steps for that reason; what lies beyond a row's own is masked.

What is captured is the model's own code, so nothing is compiled or traced: three passes to warm up, one that is recorded.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from outrider.errors import in_one_line
from outrider.models.base import has_encoder
from outrider.models.pass_graph import run_pass
from outrider.models.pass_trial import spread_off
from outrider.models.probe import TOLERANCE
from outrider.models.recorded import BEFORE_AGAIN, scored
from outrider.models.recording import Untouched
from outrider.models.tracing import Cached, Inputs, PassInputs

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel

    class CapturedModel(Cached, Protocol):
        """Whose passes are captured."""

        @property
        def name(self) -> str: ...


M = TypeVar("M", bound="CapturedModel")
LEAST_COLUMNS = 256
WARM_UP = 3
MOST_GRAPHS = 16
TRIED = (2, 1, 1)  # tokens of the passes by which captured ones are compared with ordinary ones; the last replays a graph
MOST_ROWS = 8  # side by side: more rows change too often, and keep a GPU busy without
_log = logging.getLogger(__name__)


def columns_captured(longest: int) -> int:
    """How many columns a graph reads: fewer than 256 more than there are, or a quarter more at most."""
    step = max(LEAST_COLUMNS, (1 << (max(longest - 1, 1).bit_length() - 1)) // 4)
    return -(-longest // step) * step


class Graphs:
    """The CUDA graphs of one function, by what it was captured with. Of those least used some are forgotten.

    run: (columns, tensors that it is about, memory that it reads and writes) → tensors.
    """

    def __init__(self, run: Callable[[int, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]) -> None:
        self._run = run
        self._held: dict[tuple[object, ...], tuple[list[Tensor], Any, tuple[Tensor, ...]]] = {}

    def __call__(self, columns: int, about: Sequence[Tensor], memory: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the function returns, overwritten by the next call."""
        where = tuple(tensor.data_ptr() for tensor in memory)
        key = (where, columns, *(tensor.shape for tensor in about))
        found = self._held.pop(key, None)
        if found is None:
            found = self._captured(columns, about, memory)
            while len(self._held) >= MOST_GRAPHS:
                del self._held[next(iter(self._held))]
        self._held[key] = found
        inputs, graph, out = found
        for held, given in zip(inputs, about, strict=True):
            held.copy_(given)
        graph.replay()
        return out

    def _captured(self, columns: int, about: Sequence[Tensor], memory: Sequence[Tensor]) -> Any:
        """Record the kernels; the function is run a few times before, on another stream, as torch asks for.

        That writes the same keys and values at the same positions as the pass that is wanted, so nothing is spoilt.
        """
        inputs, cuda = [tensor.clone() for tensor in about], torch.cuda
        make_stream: Any = cuda.Stream
        stream = make_stream(inputs[0].device)
        stream.wait_stream(cuda.current_stream(inputs[0].device))
        with cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run(columns, inputs, memory)
        cuda.current_stream(inputs[0].device).wait_stream(stream)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            out = self._run(columns, inputs, memory)
        return inputs, graph, out


def captured_pass(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """A compiled pass (`compiled`) as CUDA graphs."""
    graphs = Graphs(lambda columns, about, memory: run(columns, memory[0].shape[2], *about, *memory))

    def call(columns: int, capacity: int, tokens: Tensor, at: Tensor, *read: Tensor) -> tuple[Tensor, ...]:
        del capacity  # that of the memory
        return graphs(columns, (tokens, at), read)

    return call


class Captured(Generic[M]):
    """What is captured of a model: a function of what a pass is about, over the rows of its cache."""

    def __init__(self, model: M, function: Callable[[M, Inputs], tuple[Tensor, ...]]) -> None:
        whose = weakref.ref(model)  # which has these
        self._inputs = PassInputs(model)
        self._memory = 2 * len(model._cache.layers)
        self._untouched = Untouched(model.module)
        self._name = model.name
        self._run = partial(_called, whose, function)
        self._graphs = Graphs(self._run)
        self.failed = False

    def fits(self) -> bool:
        """Whether the model is still the one that was captured."""
        return self._untouched.holds()

    def run(self, slots: slice, longest: int, *about: Tensor) -> list[Tensor]:
        """What the function returns for these slots' rows. longest: the last position of any row + 1."""
        columns = columns_captured(longest)
        _, read = self._inputs.of(slots, columns)
        memory = read[: self._memory]
        if not self.failed:
            try:
                return [out.clone() for out in self._graphs(columns, about, memory)]
            except (RuntimeError, NotImplementedError) as error:  # what may not be captured; the ordinary pass is there
                self.failed = True
                reason = in_one_line(error, 200)
                _log.warning("passes of %s can't be captured as CUDA graphs (%s): it runs without", self._name, reason)
        return list(self._run(columns, about, memory))


def _called(
    whose: weakref.ref[M],
    function: Callable[[M, Inputs], tuple[Tensor, ...]],
    columns: int,
    about: Sequence[Tensor],
    memory: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    model = whose()
    assert model is not None
    return function(model, Inputs(columns, about, memory, {}))


class CapturedPasses(Captured["TransformersModel"]):
    """A model's passes of up to `WIDEST` tokens in each of a few rows: what `RecordedPasses` are on a CPU.

    About tokens, positions and columns to be written, int64 [R, N] each → logits [R, N, V] and the states of `layers`.
    """

    def __init__(self, model: TransformersModel, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        super().__init__(model, partial(_pass, self.layers))

    def of(self, rows: int) -> CapturedPasses | None:
        """Those for so many rows."""
        return None if self.failed or rows > MOST_ROWS else self


def _pass(layers: Sequence[int], model: TransformersModel, given: Inputs) -> tuple[Tensor, ...]:
    return run_pass(model, layers, True, given)


@torch.inference_mode()
def capture_passes(model: TransformersModel, layers: Sequence[int]) -> CapturedPasses | None:
    """The passes of a model on a GPU; None, with a warning, where they give other logits than ordinary ones.

    layers: whose states are handed out. They are captured when they are first wanted, here only some to be tried.
    """
    if has_encoder(model):
        return None
    twins = model.with_a_cache_of_its_own(), model.with_a_cache_of_its_own()
    tried = CapturedPasses(twins[1], layers)
    most = (model.max_length or BEFORE_AGAIN + sum(TRIED) + 1) - 1
    before = max(0, min(BEFORE_AGAIN, most - sum(TRIED)))
    wanted, got = (scored(twin, passes, TRIED, 1, layers, before) for twin, passes in zip(twins, (None, tried), strict=True))
    if tried.of(1) is None:
        return None
    off = max(spread_off(a, b) for a, b in zip(wanted, got, strict=True))
    if not off <= TOLERANCE.get(model.dtype, 0.15):
        _log.warning(
            "captured passes of %s give other logits, off by %.2g of their spread: it runs without", model.name, off
        )
        return None
    return CapturedPasses(model, layers)
