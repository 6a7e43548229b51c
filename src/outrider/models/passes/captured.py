"""Passes as CUDA graphs: one launch instead of a thousand.

Keys and values are written at positions that are a tensor; other rows, widths, or numbers of columns that are read have a
graph of their own (`cuda_graphs`). Columns are read in steps for that reason, what lies beyond a row's own is masked, and
passes are padded to a few widths.

What is captured is a lean pass (`lean`) where the model has one, else the model's own code, so nothing is traced: an
ordinary pass, one to warm up, one that is recorded.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from outrider.errors import in_one_line
from outrider.models.attention.shared_keys import WIDEST
from outrider.models.lean.run import LeanPass
from outrider.models.passes.cuda_graphs import Graphs
from outrider.models.passes.graph import run_pass
from outrider.models.passes.recording import Untouched
from outrider.models.passes.tracing import Cached, Inputs, PassInputs

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel

    class CapturedModel(Cached, Protocol):
        """Whose passes are captured."""

        @property
        def name(self) -> str: ...


_log = logging.getLogger(__name__)
M = TypeVar("M", bound="CapturedModel")
LEAST_COLUMNS = 256
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, WIDEST)
MOST_ROWS = 8  # side by side: more rows change too often, and keep a GPU busy without


def columns_captured(longest: int) -> int:
    """How many columns a graph reads: fewer than 256 more than there are, or a quarter more at most."""
    step = max(LEAST_COLUMNS, (1 << (max(longest - 1, 1).bit_length() - 1)) // 4)
    return -(-longest // step) * step


def width_captured(tokens: int) -> int:
    """How many tokens a row a pass of so many is captured for: each number would have a graph of its own."""
    return next(width for width in WIDTHS if width >= tokens)


def captured_pass(run: Callable[..., tuple[Tensor, ...]], name: str) -> Callable[..., tuple[Tensor, ...]]:
    """A compiled pass (`compiled`) of a model of that name as CUDA graphs."""
    graphs = Graphs(lambda columns, about, memory: run(columns, memory[0].shape[2], *about, *memory), name)

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
        self._untouched = Untouched(model.module, addresses=True)
        self.uncaptured = partial(_called, whose, function)
        """The function, as it is captured: (columns, what the pass is about, the cache's rows) → tensors."""
        self.graphs = Graphs(self.uncaptured, model.name)

    @property
    def failed(self) -> bool:
        """Whether nothing is captured any more."""
        return bool(self.graphs.failed)

    def fits(self) -> bool:
        """Whether the model is still the one that was captured."""
        return self._untouched.holds()

    def read(self, slots: slice, longest: int) -> tuple[int, list[Tensor]]:
        """The columns that a pass reads, and the rows of the cache. longest: the last position of any row + 1."""
        columns = columns_captured(longest)
        _, held = self._inputs.of(slots, columns)
        return columns, held[: self._memory]

    def run(self, slots: slice, longest: int, *about: Tensor) -> list[Tensor]:
        """What the function returns for these slots' rows. longest: see `read`."""
        columns, memory = self.read(slots, longest)
        return [out.clone() for out in self.graphs(columns, about, memory)]


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

    def __init__(self, model: TransformersModel, layers: Sequence[int], lean: LeanPass | None = None) -> None:
        self.layers = tuple(layers)
        self.lean = lean
        super().__init__(model, partial(_pass, self.layers, lean))

    def of(self, rows: int, width: int) -> CapturedPasses | None:
        """Those for so many rows."""
        del width
        return None if self.failed or rows > MOST_ROWS else self


def _pass(layers: Sequence[int], lean: LeanPass | None, model: TransformersModel, given: Inputs) -> tuple[Tensor, ...]:
    tokens, positions, at = given.about
    if lean is not None and lean.works and lean.takes(*tokens.shape):
        try:
            return lean.run(tokens, positions, at, given.columns, given.rows, layers)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's or a driver's, for a shape that comes for the first time
            lean.works = False
            say_not_lean(model.name, in_one_line(error, 200))
    return run_pass(model, layers, True, given)


def say_not_lean(name: str, reason: str) -> None:
    """Its own code is captured instead."""
    _log.warning("%s runs without lean passes (%s)", name, reason)
