"""Rows of tokens laid end to end in one pass: where each begins, parts of at most so many tokens, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from itertools import groupby

import torch
from torch import Tensor


def begins(lengths: Iterable[int]) -> list[int]:
    """Where each of some parts begins that follow one another, and where the last one ends."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return ends


def in_parts(lengths: Many[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """All tokens of rows of these lengths, in their order, at most so many at once. → of each row in a part its number,
    the first of its tokens, and how many
    """
    part: list[tuple[int, int, int]] = []
    room = most
    for i, length in enumerate(lengths):
        start = 0
        while start < length:
            count = min(room, length - start)
            part.append((i, start, count))
            start, room = start + count, room - count
            if not room:
                yield part
                part, room = [], most
    if part:
        yield part


def flattened(tokens: Tensor, counts: Many[int]) -> Tensor:
    """The first counts[i] of each row i, one after the other. [R, N] → [1, sum of counts]"""
    if min(counts) == tokens.shape[1]:
        return tokens.reshape(1, -1).contiguous()
    return torch.cat([row[:count] for row, count in zip(tokens, counts, strict=True)]).unsqueeze(0)


def in_rows(flat: Tensor, counts: Many[int]) -> Tensor:
    """[sum of counts, V] → [R, longest, V]; anything behind a shorter row's own, which is memory that nobody touched."""
    longest = max(counts)
    if min(counts) == longest:
        return flat.view(len(counts), longest, flat.shape[-1])
    out, row, at = flat.new_empty(len(counts), longest, flat.shape[-1]), 0, 0
    for count, alike in groupby(counts):
        rows = len(list(alike))
        out[row : row + rows, :count] = flat[at : at + rows * count].view(rows, count, -1)
        row, at = row + rows, at + rows * count
    return out


def last_of(flat: Tensor, counts: Many[int]) -> Tensor:
    """What comes of each row's last token. [sum of counts, V] → [R, 1, V]"""
    if len(counts) == len(flat):
        return flat.unsqueeze(1)
    return flat[torch.tensor(begins(counts)[1:]) - 1].unsqueeze(1)
