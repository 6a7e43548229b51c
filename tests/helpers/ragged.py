"""What every engine with a slot cache must do: ragged calls, roll-backs and closed slots give the plain pass's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.models.cache.runs import Mark, Steps
from outrider.models.transformers_model import TransformersModel
from outrider.prefill import prefill
from outrider.support.device_data import pad_rows
from tests.helpers.tiny_models import VOCABULARY


def score(model: TransformersModel, sequences: list[Any], rows: list[list[int]]) -> list[Tensor]:
    tokens, lengths = pad_rows(rows, model.device)
    out = model.score(sequences, tokens, lengths, "all")
    assert out is not None
    return [out[i, :n] for i, n in enumerate(lengths)]


def some_tokens(length: int, seed: int, size: int = VOCABULARY) -> list[int]:
    return torch.randint(3, size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(model: TransformersModel, tokens: list[int]) -> Tensor:
    """The logits of a forward pass without any cache. [T, V]"""
    with torch.inference_mode():
        logits: Tensor = model.module(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


def ragged_difference(
    model: TransformersModel, sequences: list[Any], rows: Sequence[list[int]], wanted: Sequence[Tensor]
) -> float:
    """The most by which ragged calls, roll-backs, subsets and a closed slot differ from the plain pass's logits.

    rows: three, of 40, 23 and 31. wanted: of each, [T, V].
    """
    off: list[Tensor] = []

    def compare(got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape
        off.append((got - want).abs().max())

    prefill(model, sequences, [rows[0][:20], rows[1][:5], rows[2][:11]])
    # A draft that is rejected in part: wrong tokens first, then the right ones.
    score(model, sequences, [[4, 5, 6, 7], [8], [9, 10, 11]])
    for sequence, length in zip(sequences, (20, 5, 11), strict=True):
        sequence.truncate(length)
    for start, width in ((0, 3), (3, 1), (4, 6)):
        parts = [row[done + start : done + start + width] for row, done in zip(rows, (20, 5, 11), strict=True)]
        for got, want, done in zip(score(model, sequences, parts), wanted, (20, 5, 11), strict=True):
            compare(got, want[done + start : done + start + width])
    # A subset that is not contiguous, of different lengths, in another order.
    parted = score(model, [sequences[2], sequences[0]], [rows[2][21:26], rows[0][30:33]])
    compare(parted[0], wanted[2][21:26])
    compare(parted[1], wanted[0][30:33])
    # One row is closed, another takes its slot, and its source with it where there is one.
    sequences[0].close()
    moved = score(model, [sequences[1], sequences[2]], [rows[1][15:18], rows[2][26:27]])
    compare(moved[0], wanted[1][15:18])
    compare(moved[1], wanted[2][26:27])
    return float(torch.stack(off).max())  # NaN stays, and is no small number


def last_state(mark: Mark, key: Any) -> Tensor:
    """In place of `Mark.of`, a planted fault: what is rolled back keeps the state of what was rejected."""
    states = mark.run.states[key]
    last = states.last if isinstance(states, Steps) else states[-1]
    return last[mark.row : mark.row + 1]
