"""Whole steps of sampling in one call each, from and to plain memory: see `sampling_calls.cpp`.

Beside a model whose weights have just swept the caches a call of a torch operation costs some 100 µs, whatever it does, and
one by `ctypes` half of that.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ParameterError

_WHERE, _WHOLE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_LAW = (_REAL, _WHOLE, _REAL, _REAL)

Law = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p: see `SamplingSettings.law`."""

Races = tuple[Many[int], Many[int]]
"""Of each row a stream's key and a position: see `sampling.race`."""


@dataclass(frozen=True)
class Step:
    """What was drafted in one step, a number a row.

    tokens: -1 where there is no law. shares: their probabilities at temperature 1, before any filter; others: what else was
    likely then, the likeliest first, as (token, probability). Both are empty unless asked for, and nothing without a law.
    """

    tokens: list[int]
    shares: list[float]
    others: list[list[tuple[int, float]]]


class SamplingCalls:
    """library: the file of the kernels."""

    def __init__(self, library: Path) -> None:
        opened = ctypes.CDLL(str(library))
        self._step = opened.outrider_step
        self._step.restype = _WHOLE
        self._step.argtypes = [_WHERE, *[_WHOLE] * 4, *_LAW, *[_WHERE] * 5, _WHOLE, *[_WHERE] * 2, _WHOLE, _REAL]
        self._step.argtypes += [_WHERE] * 3
        self._decide = opened.outrider_decide
        self._decide.restype = _WHOLE
        self._decide.argtypes = [_WHERE, *[_WHOLE] * 6, *_LAW, *[_WHERE] * 2, _WHOLE, *[_WHERE] * 5, *[_WHOLE] * 2, _WHERE]

    def step(
        self,
        logits: Tensor,
        law: Law,
        uniforms: Many[float] = (),
        laws: Many[int] = (),
        width: int = 0,
        ids: Tensor | None = None,
        reads: bool = False,
        most: int = 0,
        least: float = 0.0,
        races: Races | None = None,
    ) -> Step:
        """A token a row of a draft.

        logits: [A, T], float32 or bfloat16 on a CPU, as they are. uniforms: A of them, unless greedy or by `races`. laws: A
        addresses of `width` numbers of float32 each, where the laws are written, unless greedy.
        ids: int64 [T], ascending, the tokens that columns stand for, if these are not the first ones.
        reads: fill `Step.shares`, and `Step.others` with `most` tokens of a probability above `least`.
        Raises `ParameterError` for ids that are not of this kind, or beyond `width`.
        """
        rows, count = logits.shape
        logits = _in_one_piece(logits)
        tokens, shares = array("q", bytes(8 * rows)), array("d", bytes(8 * rows)) if reads else None
        others, counts = array("q", bytes(8 * rows * most)), array("q", bytes(8 * rows))
        other_shares = array("d", bytes(8 * rows * most))
        points, where = array("d", uniforms), array("q", laws)
        keys, positions = _in_arrays(races)
        assert law[0] == 0.0 or (len(where) == rows and width >= count)
        assert law[0] == 0.0 or rows == (len(points) if races is None else len(keys))
        if ids is not None and (ids.shape != (count,) or ids.dtype is not torch.long or ids.stride(0) != 1):
            raise ParameterError(f"ids must be int64 [{count}] in one piece, got {ids.dtype} {list(ids.shape)}")
        wrong = self._step(
            logits.data_ptr(),
            _half(logits),
            rows,
            logits.stride(0),
            count,
            *law,
            _at(points),
            _at(keys),
            _at(positions),
            0 if ids is None else ids.data_ptr(),
            _at(where),
            width,
            _at(tokens),
            0 if shares is None else _at(shares),
            most,
            least,
            _at(others),
            _at(other_shares),
            _at(counts),
        )
        if wrong:
            raise ParameterError(f"ids must be in 0 … {width - 1}, the target's tokens, got one that is not")
        if shares is None:
            return Step(tokens.tolist(), [], [])
        pairs = list(zip(others, other_shares, strict=True))
        found = [pairs[m * most : m * most + counts[m]] for m in range(rows)]
        return Step(tokens.tolist(), shares.tolist(), found)

    def decide(
        self,
        logits: Tensor,
        first: Many[int],
        vocab_size: int,
        law: Law,
        drafts: Many[Many[int]],
        uniforms: Many[Many[float]],
        laws: Tensor | None,
        races: Races | None = None,
    ) -> list[tuple[int, int]]:
        """What the acceptance rule keeps of each row's draft. → how many tokens, and the one after them, -1 without a law

        logits: [R, N, V] or wider, float32 or bfloat16 on a CPU; row i's first own position is first[i].
        uniforms: of each row one a drafted token and one for the token after them. laws: float32 [R, K, V], of the drafts,
        None if they are certain. races: in place of both, at the first of those places.
        Raises `ParameterError` for a token beyond the vocabulary.
        """
        lengths = [len(draft) for draft in drafts]
        width = max(lengths)
        tokens, points = array("q", _side_by_side(drafts, width)), array("d", _side_by_side(uniforms, width + 1))
        keys, positions = _in_arrays(races)
        assert len(logits) == len(first) == len(lengths)
        assert len(keys) == len(lengths) if keys else [len(own) for own in uniforms] == [length + 1 for length in lengths]
        assert logits.shape[2] >= vocab_size
        logits = _in_one_piece(logits)
        where, row_stride, stride = 0, 0, 0
        if laws is not None:
            laws = _in_one_piece(laws)
            rows, places, own = laws.shape
            assert (rows, own) == (len(lengths), vocab_size)
            assert places >= width
            where, (row_stride, stride) = laws.data_ptr(), laws.stride()[:2]
        found, begin, counts = array("q", bytes(16 * len(lengths))), array("q", first), array("q", lengths)
        wrong = self._decide(
            logits.data_ptr(),
            _half(logits),
            len(lengths),
            logits.shape[1],
            *logits.stride()[:2],
            vocab_size,
            *law,
            _at(begin),
            _at(tokens),
            width,
            _at(counts),
            _at(points),
            _at(keys),
            _at(positions),
            where,
            row_stride,
            stride,
            _at(found),
        )
        if wrong:
            outside = [token for draft in drafts for token in draft if not 0 <= token < vocab_size]
            assert outside, "a row's own positions are not all among those that were scored"
            raise ParameterError(f"draft_tokens must be in 0 … {vocab_size - 1}, got {outside[0]}")
        return list(zip(found[::2], found[1::2], strict=True))


def _side_by_side(rows: Many[Many[Any]], width: int) -> list[Any]:
    """Numbers of one row after the other, zeros behind those that are shorter than `width`."""
    numbers: list[Any] = []
    for row in rows:
        numbers += [*row, *[0] * (width - len(row))]
    return numbers


def _in_arrays(races: Races | None) -> tuple[array[int], array[int]]:
    """Keys and positions; both empty for none."""
    keys, positions = ((), ()) if races is None else races
    assert len(keys) == len(positions)
    return array("q", keys), array("q", positions)


def _at(values: array[int] | array[float]) -> int:
    """Its address, 0 for an empty one; it has to outlive the call."""
    return values.buffer_info()[0] if len(values) else 0


def _half(logits: Tensor) -> bool:
    """Whether they are in bfloat16; else they are in float32."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise ParameterError(f"logits must be in float32 or bfloat16, got {logits.dtype}")
    return logits.dtype is torch.bfloat16


def _in_one_piece(values: Tensor) -> Tensor:
    """Tokens side by side."""
    return values if values.stride(-1) == 1 else values.contiguous()
