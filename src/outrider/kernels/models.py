"""The operations that passes of quantized models are made of (`models.kernels` has the layers that call them)."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.build import Library, UnbuiltError, built, built_here
from outrider.kernels.chain_calls import ChainCalls

LIBRARY = Library(
    "kernels",
    ("quantized_linear", "packing", "rows", "attention", "chain_plan", "chain"),
    (
        "rows.h",
        "linear.h",
        "activations.h",
        "blocks.h",
        "tokens.h",
        "attention.h",
        "attention_pass.h",
        "attention_avx512.h",
        "attention_avx2.h",
        "chain_plan.h",
    ),
    "outrider",
    "kernels",
)
chain_calls: dict[str, ChainCalls] = {}
"""Of the libraries that are open, by the namespace of their operations."""
_log = logging.getLogger(__name__)


class Kernels:
    """Operations of torch: `linear_int8`, `linear_grouped`, `pack_int8`, `pack_int4`, `pack_k`, `unpack_k`, `rms_norm`,
    `silu`, `gelu`, `rotate`, `angles`, `seen`, `rows_int8`, `attend`; `join`, `fused_int8`, `fused_grouped` and
    `attend_new` are several of these in one, `chain` is any number of them (`fusing`).

    What they are given and return: see their sources.

    largest: what a weight in 8 bits is at most, 127 or 64. digest: of their sources and how they are compiled.
    """

    def __init__(self, level: str, library: Path) -> None:
        self.level = level
        self.digest = library.parent.name.rpartition("-")[2]
        self.largest = 64 if level == "avx2" else 127
        self.ops: Any = getattr(torch.ops, LIBRARY.within(level))
        if not hasattr(self.ops, "linear_grouped"):  # torch ends the process if an operation is defined twice
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            chain_calls[LIBRARY.within(level)] = ChainCalls(library)  # a second file would define them again, too
            for name in ("linear_int8", "linear_grouped"):
                torch.library.register_fake(f"{LIBRARY.within(level)}::{name}", _shape)
            for name in ("rms_norm", "silu", "gelu"):
                torch.library.register_fake(f"{LIBRARY.within(level)}::{name}", _same)
            torch.library.register_fake(f"{LIBRARY.within(level)}::attend", _attended)
            torch.library.register_fake(f"{LIBRARY.within(level)}::rows_int8", _looked_up)
            torch.library.register_fake(f"{LIBRARY.within(level)}::angles", _turned)
        self._try()

    def _try(self) -> None:
        """Raise `UnbuiltError` unless small products are what they should be."""
        generator = torch.Generator().manual_seed(0)
        float32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch makes by default
        at: dict[str, Any] = {"generator": generator, "device": "cpu"}
        values = torch.randint(-self.largest, self.largest + 1, (35, 45), **at, dtype=torch.int8)
        x = torch.randint(-126, 127, (11, 45), **at).float()
        x[:, 0] = 127.0  # so that the scale of each row is 1
        want = x.double() @ values.double().T
        packed = self.ops.pack_int8(values)
        if not torch.equal(self.ops.linear_int8(x, packed, torch.ones(48, **float32), None, 35).double(), want):
            raise UnbuiltError("8-bit products are wrong")
        few = values.remainder(16)
        packed, _ = self.ops.pack_int4(few.float())
        want = x.double() @ few.double().T
        if not torch.allclose(self.ops.linear_grouped(x, packed, None, 35).double(), want, rtol=1e-2, atol=1e-2 * 127 * 15):
            raise UnbuiltError("4-bit products are wrong")
        for size, scales in ((144, (0, 2)), (210, (208,))):  # Q4_K and Q6_K
            raw = torch.randint(0, 256, (35, 1, size), **at, dtype=torch.uint8)
            for i in scales:  # a small number
                raw[..., i], raw[..., i + 1] = 0, 0x20
            x = torch.randint(-127, 128, (5, 256), **at).float()
            want = x.double() @ self.ops.unpack_k(raw).double().T
            found = self.ops.linear_grouped(x, self.ops.pack_k(raw), None, 35).double()
            if not torch.allclose(found, want, rtol=1e-2, atol=1e-2 * float(want.abs().max())):
                raise UnbuiltError("products of K-quants are wrong")
        rows = torch.randn(1, 3, 5, 16, **at, dtype=torch.float32)
        want = rows.double() * (rows.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * 3
        normed = self.ops.rms_norm(rows, torch.full((16,), 2.0, **float32), 1e-5, 1.0)
        turned = self.ops.rotate(rows, rows[:, :1], rows[:, 1:2])
        want_turned = rows * rows[:, :1] + torch.cat([-rows[..., 8:], rows[..., :8]], -1) * rows[:, 1:2]
        scores = rows.double() @ rows[:, :1].double().transpose(2, 3)
        attended = (scores.softmax(-1) @ rows[:, 1:2].double()).transpose(1, 2)
        found = self.ops.attend(rows, rows[:, :1], rows[:, 1:2], None, 1.0)
        halves = self.ops.attend(rows, rows[:, :1].half(), rows[:, 1:2].half(), None, 1.0)
        near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
        if not torch.allclose(normed.double(), want, **near) or not torch.equal(turned, want_turned):
            raise UnbuiltError("norms or rotations are wrong")
        places = torch.tensor([[0, 3, 1000]], device="cpu")
        frequencies = torch.tensor([1.0, 0.125], **float32)
        angles = (places.double().unsqueeze(-1) * frequencies.double()).repeat(1, 1, 2)
        if not all(
            torch.allclose(a.double(), b, rtol=0.0, atol=1e-6)
            for a, b in zip(self.ops.angles(places, frequencies, 2.0), (2 * angles.cos(), 2 * angles.sin()), strict=True)
        ):
            raise UnbuiltError("angles are wrong")
        rounded = self.ops.attend(rows, rows[:, :1].half().float(), rows[:, 1:2].half().float(), None, 1.0)
        if not torch.allclose(found.double(), attended, **near) or not torch.equal(halves, rounded):
            raise UnbuiltError("attention is wrong")


def _shape(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """What the results of linear layers look like; the last argument is the number of outputs."""
    del weight
    return x.new_empty((*x.shape[:-1], others[-1]))


def _same(x: Tensor, *others: Any) -> Tensor:
    del others
    return x.new_empty(x.shape)


def _looked_up(table: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    return scales.new_empty((*ids.shape, table.shape[1]))


def _turned(positions: Tensor, frequencies: Tensor, times: float) -> tuple[Tensor, Tensor]:
    del times
    shape = (*positions.shape, 2 * frequencies.shape[0])
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


def _attended(query: Tensor, *others: Any) -> Tensor:
    del others
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], query.shape[3]))


@cache
def kernels() -> Kernels | None:
    """The best that this processor has; None, with a warning, where they can't be built. Takes seconds the first time."""
    message = "kernels for quantized weights can't be built (%s): models in 8 bits use torch's, which are slower"
    return built_here(build, _log, message)


def build(level: str) -> Kernels:
    """Those of a level. Raises `UnbuiltError`."""
    return built(LIBRARY, level, lambda library: Kernels(level, library))
