"""Steps of layers that keep a state, on a CPU, several tokens in one call, for `models.recurrent.rules`."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

from outrider.kernels.build import Library, UnbuiltError, built, level_here, warn_unbuilt

LIBRARY = Library("recurrences", ("recurrences",), ("rows.h",), "outrider_recurrences", "kernels for recurrent layers")
_log = logging.getLogger(__name__)


class RecurrenceKernels:
    """Operations of torch: `delta`, the delta rule, and `outer`, Mamba 2's. What they are given and return: see
    `recurrences.cpp`.
    """

    def __init__(self, level: str, library: Path) -> None:
        self._space: Any = getattr(torch.ops, LIBRARY.within(level))
        if not hasattr(self._space, "delta"):  # torch ends the process if an operation is defined twice
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        self.delta: Any = self._space.delta.default
        self.outer: Any = self._space.outer.default
        self._try()

    def _try(self) -> None:
        """Raise `UnbuiltError` unless a few steps give what they should."""
        generator = torch.Generator().manual_seed(0)
        at: dict[str, Any] = {"generator": generator, "device": "cpu", "dtype": torch.float32}
        q, k, v = (torch.randn(2, 3, 2, size, **at) for size in (5, 5, 70))
        beta, state = torch.rand(2, 3, 2, **at), torch.randn(2, 2, 5, 70, **at)
        for decay in (torch.rand(2, 3, 2, 1, **at), torch.rand(2, 3, 2, 5, **at)):
            out, states = self.delta(q, k, v, decay, beta, state)
            now = state.double()
            for n in range(3):
                now = now * decay[:, n, :, :, None].double()
                new = beta[:, n, :, None] * (v[:, n] - (now * k[:, n, :, :, None]).sum(2))
                now = now + k[:, n, :, :, None] * new[:, :, None]
                want = (now * q[:, n, :, :, None]).sum(2)
                close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
                if not torch.allclose(out[:, n].double(), want, **close) or not torch.allclose(
                    states[n].double(), now, **close
                ):
                    raise UnbuiltError("steps of the delta rule are wrong")
        x, decay, state = torch.randn(2, 3, 4, 5, **at), torch.rand(2, 3, 4, **at), torch.randn(2, 4, 5, 19, **at)
        b, c = (torch.randn(2, 3, 2, 19, **at) for _ in range(2))
        out, states = self.outer(x, decay, b, c, state)
        now = state.double()
        for n in range(3):
            of_heads = [one[:, n].repeat_interleave(2, 1).unsqueeze(2).double() for one in (b, c)]
            now = now * decay[:, n, :, None, None] + x[:, n, :, :, None] * of_heads[0]
            pairs = ((out[:, n].double(), (now * of_heads[1]).sum(-1)), (states[n].double(), now))
            if not all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in pairs):
                raise UnbuiltError("steps of Mamba's rule are wrong")


@cache
def recurrence_kernels() -> RecurrenceKernels | None:
    """Those for this processor; None, with a warning, where they can't be built. Takes seconds the first time."""
    level = level_here()
    if level is None:
        return None
    try:
        return built(LIBRARY, level, lambda library: RecurrenceKernels(level, library))
    except UnbuiltError as error:
        message = "kernels for recurrent layers can't be built (%s): they take torch's, which are slower"
        warn_unbuilt(_log, message, error)
        return None
