"""How float32 matrices are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def products(precision: str) -> Iterator[None]:
    """How they are meanwhile: "medium" lets factors be rounded to bfloat16 where that is quicker."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
