"""A GPU that is there, behind the names of the simulated one: what the simulation's tests claim is held to it.

    OUTRIDER_TEST_GPU=1 pytest tests/devices -k "simulated_gpu or captured or cuda_graphs"

torch itself tells what the host waits for (`torch.cuda.set_sync_debug_mode`), by warnings.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.helpers.simulated_gpu import SimulatedGPU

WANTED = os.environ.get("OUTRIDER_TEST_GPU") == "1"
_WAITED = "called a synchronizing CUDA operation"
_cuda: Any = torch.cuda


class RealGPU:
    """waits: what the host had to wait for, in turn; of a real one it is only known that it did."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    @property
    def capturing(self) -> bool:
        """Whether kernels are recorded now."""
        return bool(torch.cuda.is_current_stream_capturing())

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        """As another device; skips the test where there is none."""
        if index >= torch.cuda.device_count():
            pytest.skip(f"there is no GPU of number {index}")
        with torch.cuda.device(index):
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the waits. Inside a test, whose warnings are otherwise errors."""
        show = warnings.showwarning

        def note(message: Warning | str, *about: Any, **more: Any) -> None:
            if _WAITED in str(message):
                self.waits.append("read back")
            else:
                show(message, *about, **more)

        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=_WAITED)
            warnings.showwarning = note
            _cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                _cuda.set_sync_debug_mode("default")


GPU = SimulatedGPU | RealGPU
