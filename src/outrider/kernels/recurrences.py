"""Steps of layers that keep a state, on a CPU, several tokens in one call, for `models.recurrent.rules`."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.build import Library, UnbuiltError, built, built_here

LIBRARY = Library("recurrences", ("recurrences",), ("rows.h",), "outrider_recurrences", "kernels for recurrent layers")
_log = logging.getLogger(__name__)


class RecurrenceKernels:
    """Operations of torch: `delta`, the delta rule, `outer`, Mamba 2's, and `scan`, Mamba 1's; `delta_again` and so on give
    the states in between, with the same bits. What they are given and return: see `recurrences.cpp`.
    """

    def __init__(self, level: str, library: Path) -> None:
        self._space: Any = getattr(torch.ops, LIBRARY.within(level))
        if not hasattr(self._space, "delta"):  # torch ends the process if an operation is defined twice
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            torch.library.register_fake(f"{LIBRARY.within(level)}::delta", _shapes_of_delta)
            torch.library.register_fake(f"{LIBRARY.within(level)}::outer", _shapes_of_outer)
            torch.library.register_fake(f"{LIBRARY.within(level)}::scan", _shapes_of_scan)
        self.delta: Any = self._space.delta.default
        self.delta_again: Any = self._space.delta_again.default
        self.outer: Any = self._space.outer.default
        self.outer_again: Any = self._space.outer_again.default
        self.scan: Any = self._space.scan.default
        self.scan_again: Any = self._space.scan_again.default
        self._try()

    def _try(self) -> None:
        """Raise `UnbuiltError` unless a few steps give what they should."""
        generator = torch.Generator().manual_seed(0)
        at: dict[str, Any] = {"generator": generator, "device": "cpu", "dtype": torch.float32}
        q, k, v = (torch.randn(2, 3, 2, size, **at) for size in (5, 5, 70))
        beta, state = torch.rand(2, 3, 2, **at), torch.randn(2, 2, 5, 70, **at)
        for decay in (torch.rand(2, 3, 2, 1, **at), torch.rand(2, 3, 2, 5, **at)):
            out, added, last = self.delta(q, k, v, decay, beta, state)
            wanted, now = [], state.double()
            for n in range(3):
                now = now * decay[:, n, :, :, None].double()
                new = beta[:, n, :, None] * (v[:, n] - (now * k[:, n, :, :, None]).sum(2))
                now = now + k[:, n, :, :, None] * new[:, :, None]
                wanted.append(((now * q[:, n, :, :, None]).sum(2), now))
            states = [self.delta_again(k, added, decay, state, n) for n in (1, 2, 3)]
            _compare(out, [*states[:2], last], wanted, "the delta rule")
            if not torch.equal(states[2], last):
                raise UnbuiltError("steps of the delta rule that are made again are others")
        x, decay, state = torch.randn(2, 3, 4, 5, **at), torch.rand(2, 3, 4, **at), torch.randn(2, 4, 5, 19, **at)
        b, c = (torch.randn(2, 3, 2, 19, **at) for _ in range(2))
        out, last = self.outer(x, decay, b, c, state)
        wanted, now = [], state.double()
        for n in range(3):
            of_heads = [one[:, n].repeat_interleave(2, 1).unsqueeze(2).double() for one in (b, c)]
            now = now * decay[:, n, :, None, None] + x[:, n, :, :, None] * of_heads[0]
            wanted.append(((now * of_heads[1]).sum(-1), now))
        states = [self.outer_again(x, decay, b, state, n) for n in (1, 2, 3)]
        _compare(out, [*states[:2], last], wanted, "Mamba's rule")
        if not torch.equal(states[2], last):
            raise UnbuiltError("steps of Mamba's rule that are made again are others")
        self._try_scan(at)

    def _try_scan(self, at: dict[str, Any]) -> None:
        x, state = torch.randn(2, 3, 5, **at), torch.randn(2, 5, 19, **at)
        dt, a = torch.rand(2, 3, 5, **at), -torch.rand(5, 19, **at)
        b, c = (torch.randn(2, 3, 19, **at) for _ in range(2))
        out, last = self.scan(x, dt, a, b, c, state, False)
        wanted, now = [], state.double()
        for n in range(3):
            size = dt[:, n, :, None].double()
            now = now * (size * a).exp() + size * x[:, n, :, None] * b[:, n, None]
            wanted.append(((now * c[:, n, None]).sum(-1), now))
        states = [self.scan_again(x, dt, a, b, state, n) for n in (1, 2, 3)]
        _compare(out, [*states[:2], last], wanted, "Mamba's first rule")
        if not torch.equal(states[2], last):
            raise UnbuiltError("steps of Mamba's first rule that are made again are others")


def _shapes_of_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del q, k, decay, beta
    return v.new_empty(v.shape), v.new_empty(v.shape), state.new_empty(state.shape)


def _shapes_of_outer(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    del decay, b, c
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _shapes_of_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, coarse: bool
) -> tuple[Tensor, Tensor]:
    del dt, a, b, c, coarse
    return x.new_empty(x.shape), state.new_empty(state.shape)


def _compare(out: Tensor, states: list[Tensor], wanted: list[tuple[Tensor, Tensor]], what: str) -> None:
    for n, (made, state) in enumerate(wanted):
        pairs = ((out[:, n].double(), made), (states[n].double(), state))
        if not all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in pairs):
            raise UnbuiltError(f"steps of {what} are wrong")


@cache
def recurrence_kernels() -> RecurrenceKernels | None:
    """Those for this processor; None, with a warning, where they can't be built. Takes seconds the first time."""
    message = "kernels for recurrent layers can't be built (%s): they take torch's, which are slower"
    return built_here(_build, _log, message)


def _build(level: str) -> RecurrenceKernels:
    return built(LIBRARY, level, lambda library: RecurrenceKernels(level, library))
