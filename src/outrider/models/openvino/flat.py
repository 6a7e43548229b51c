"""Rows of tokens laid end to end in one pass: what is kept of it, and where it lies in the cache."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from outrider.models.base import WhichLogits
from outrider.models.flat import begins


def places(blocks: Many[list[int]], size: int, starts: Many[int], counts: Many[int]) -> NDArray[np.int64]:
    """Where in caches of blocks of `size` some positions of each row lie: block · size + offset."""
    rows = []
    for own, start, count in zip(blocks, starts, counts, strict=True):
        at = np.arange(start, start + count)
        rows.append(np.array(own, np.int64)[at // size] * size + at % size if count else at)
    return np.concatenate(rows)


def kept(counts: Many[int], widths: Many[int], logits: WhichLogits) -> list[int]:
    """Positions in the flat pass whose logits are computed: for "all" every token's, for "last" each row's last one's.

    counts: tokens of each row. widths: with what is filled in behind them.
    """
    starts = begins(widths)
    if logits == "none":
        return [starts[-1] - 1]
    if logits == "last":
        return [begin + count - 1 for begin, count in zip(starts, counts, strict=False)]
    return [begin + i for begin, count in zip(starts, counts, strict=False) for i in range(count)]
