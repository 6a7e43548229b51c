"""Between host and device: small host data on its way to the device without waiting for it, and where rows are better
sampled one by one on the host than side by side on the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

_ARRAYS = {torch.long: np.int64, torch.float64: np.float64, torch.float32: np.float32}


def to_device(values: Many[int] | Many[float] | Many[Many[float]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of host numbers on `device`. Pinned and asynchronous on CUDA, so that it costs no synchronisation."""
    if device.type == "cpu" and dtype in _ARRAYS:  # half the time of torch's own way, beside a model
        return torch.from_numpy(np.array(values, dtype=_ARRAYS[dtype]))
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def moved(values: Tensor, device: torch.device) -> Tensor:
    """The same on another device, as of a draft that runs elsewhere than its target. From a GPU to the host it waits."""
    if values.device == device:
        return values
    if values.device.type == "cpu" and device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def index(values: Many[int], device: torch.device) -> Tensor:
    """An int64 index on `device`."""
    return to_device(values, device, torch.long)


def places_from(starts: Many[int], count: int, device: torch.device) -> Tensor:
    """The places of `count` tokens from each row's start on. → int64 [R, count]"""
    if len(starts) == 1:  # two operations where there would be four
        return torch.arange(starts[0], starts[0] + count, device=device).unsqueeze(0)
    return index(starts, device).unsqueeze(-1) + torch.arange(count, device=device)


def pad_rows(rows: Many[Many[int]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Token lists as one tensor, padded on the right with 0. → int64 [R, N], the lengths"""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    return to_device([list(row) + [0] * (width - len(row)) for row in rows], device, torch.long), lengths


ROW_BY_ROW_FROM = 1024  # entries


def row_by_row(values: Tensor) -> bool:
    """Whether few operations a row beat one operation over all rows: on a CPU, at the vocabulary of a real model."""
    return values.device.type == "cpu" and values.shape[-1] > ROW_BY_ROW_FROM
