"""A chain of operations in one call, from and to plain memory: see `chain.cpp`.

Where a pass is no more than a chain, neither torch's interpreter nor its dispatcher has anything to do, and results can be
written to where they are kept.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_WHERE, _WHOLE = ctypes.c_void_p, ctypes.c_int64
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2}  # as `Piece` has them
Piece = tuple[int, int, int]
"""What a chain is given: an address, a type, the width of activations, 0 of whole numbers."""
Place = tuple[int, int]
"""Where a result is written: an address of float32, and the width of what is kept there."""
Span = tuple[int, int, int]
"""A sequence's part of a pass: the row of its keys and values, how many tokens, and how many columns they read."""


def is_piece(x: Tensor) -> bool:
    """Whether it is what `piece_of` is for: of one row (of several sequences' tokens, maybe), on a CPU, in one piece."""
    return x.is_cpu and x.dim() >= 2 and x.shape[0] == 1 and x.is_contiguous()


def piece_of(x: Tensor) -> Piece:
    """Of activations [1, N, width], or whole numbers [1, N], which the tensor has to hold meanwhile. See `is_piece`."""
    return x.data_ptr(), _TYPES.get(x.dtype, -1), x.shape[2] if x.dim() == 3 else 0


def numbers(values: array[int]) -> Piece:
    """Of int64, which have to outlive the call."""
    return values.buffer_info()[0], _TYPES[torch.int64], 0


class ChainPlan:
    """A plan, as such calls take it. widths: of each result. single: which are of each sequence's last token alone."""

    def __init__(self, calls: ChainCalls, plan: Tensor) -> None:
        self._run = calls.run
        self._plan = plan
        self._at, self._size = plan.data_ptr(), plan.numel()
        self.widths, self.single = calls.results_of(self._at, self._size)

    def run(self, spans: Sequence[Span], given: Sequence[Piece], counts: Sequence[int], results: Sequence[int]) -> None:
        """given: of N tokens, the spans' one after the other. results: addresses of float32, [N, width] each, or [R, width]
        of R spans; 0 for one that is not wanted.

        Raises `RuntimeError` for what it does not fit.
        """
        sequences = array("q", [number for span in spans for number in span])
        pieces = array("q", [number for piece in given for number in piece])
        found, at = array("q", counts), array("q", results)
        wrong = self._run(
            self._at,
            self._size,
            len(spans),
            sequences.buffer_info()[0],
            len(given),
            pieces.buffer_info()[0],
            len(found),
            found.buffer_info()[0],
            len(at),
            at.buffer_info()[0],
        )
        if wrong is not None:
            raise RuntimeError(wrong.decode(errors="replace"))


class ChainCalls:
    """library: the file of the kernels."""

    def __init__(self, library: Path) -> None:
        opened = ctypes.CDLL(str(library))
        self.run = opened.outrider_chain
        self.run.restype = ctypes.c_char_p
        self.run.argtypes = [_WHERE, _WHOLE, _WHOLE, _WHERE, _WHOLE, _WHERE, _WHOLE, _WHERE, _WHOLE, _WHERE]
        self._results = opened.outrider_chain_results
        self._results.restype = _WHOLE
        self._results.argtypes = [_WHERE, _WHOLE, _WHOLE, _WHERE]

    def results_of(self, plan: int, size: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """How wide each result of a plan is, and whether it is of the last token alone."""
        count = self._results(plan, size, 0, None)
        both = array("q", bytes(16 * max(0, count)))
        if count < 0 or self._results(plan, size, count, both.buffer_info()[0]) != count:
            raise RuntimeError("this is not a plan")
        return tuple(both[:count]), tuple(map(bool, both[count:]))
