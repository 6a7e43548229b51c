"""A lean pass: the launches of `kernels` for a model (`layout`), over the memory of the slot cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.models.base import LAST
from outrider.models.lean.layout import Layer, Layout, layout_of

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel

COLUMNS = 64  # of the cache that are read at once
MOST_CHUNKS = 32
MOST_TOKENS = 64  # of a pass
MOST_QUERIES = 128  # that share keys
LEAST_SHARED = 99 << 10  # bytes of a program's shared memory, where torch does not tell what the device has


@dataclass(frozen=True)
class Shape:
    """How a product is cut: rows of a weight and columns of it a block, parts of K, and warps and stages of a program."""

    rows: int
    columns: int
    parts: int
    warps: int = 4
    stages: int = 4


class LeanPass:
    """Passes of one model, as long as its weights are where they are.

    processors: of the device, which a product should keep busy. memory: bytes that programs of one of them share.
    """

    works = True  # until a kernel can't be compiled or launched

    def __init__(self, layout: Layout, processors: int, memory: int = 1 << 20) -> None:
        from outrider.models.lean import kernels

        self._kernels: Any = kernels
        self._layout = layout
        self._processors, self._memory = processors, memory
        dtype = layout.table.dtype
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self.shapes: dict[tuple[int, int], Shape] = {}

    def takes(self, rows: int, width: int) -> bool:
        """Whether a pass of so many rows and tokens a row is for these kernels: more are no longer as quick as one, and
        attention of that many queries would be compiled for a minute.
        """
        return rows * width <= MOST_TOKENS and width * (self._layout.heads // self._layout.kv_heads) <= MOST_QUERIES

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, positions: Tensor, at: Tensor, columns: int, rows: Sequence[Tensor], layers: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """tokens, positions, at: int64 [R, N], the columns one after the other; columns: that are read; rows: keys and
        values of each layer [R, heads, capacity, size] → logits [R, N, V], states of `layers` (from 1, or `LAST`) [R, N, W].
        """
        device = tokens.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton takes the current one
            return self._run(tokens.contiguous(), positions.contiguous(), at.contiguous(), columns, rows, layers)

    def _run(
        self, tokens: Tensor, positions: Tensor, at: Tensor, columns: int, rows: Sequence[Tensor], layers: Sequence[int]
    ) -> tuple[Tensor, ...]:
        layout = self._layout
        wanted = set(layers)
        states: dict[int, Tensor] = {}
        first = layout.layers[0].before if layout.layers else layout.norm
        residual, x = self._add_norm(layout.table, None, first, tokens)
        for number, layer in enumerate(layout.layers, 1):
            attended = self._attend(layer, x, positions, at, columns, rows[2 * number - 2], rows[2 * number - 1])
            residual, x = self._add_norm(residual, self._product(attended, layer.out), layer.between)
            inner = self._gated(x, layer)
            after = layout.layers[number].before if number < len(layout.layers) else layout.norm
            residual, x = self._add_norm(residual, self._product(inner, layer.down), after)
            if number in wanted:
                states[number] = residual
        states[LAST] = x
        logits = self._product(x, layout.head, whole=True)
        shape = (*tokens.shape, -1)
        return logits.view(shape), *(states[layer].view(shape) for layer in layers)

    def _add_norm(
        self, residual: Tensor, parts: Tensor | None, weight: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The sum, and it normed; of a table, its rows for `tokens`."""
        width = weight.shape[0]
        count = residual.shape[0] if tokens is None else tokens.numel()
        out, normed = (residual.new_empty(count, width) for _ in range(2))
        self._kernels.add_norm[(count,)](
            residual, residual if parts is None else parts, weight, residual if tokens is None else tokens, out, normed,
            count, self._layout.eps,
            WIDTH=width, BLOCK=_power(width), SPLITS=0 if parts is None else len(parts), EMBED=tokens is not None,
            num_warps=8 if width > 1024 else 4,
        )  # fmt: skip
        return out, normed

    def _shape(self, rows: int, columns: int, whole: bool) -> Shape:
        """What was quickest on an H200 (EXPERIMENTS.md, "On a GPU")."""
        known = self.shapes.get((rows, columns))
        if known is not None:
            return known
        if whole and rows >= 256 * self._processors:
            return Shape(64, 128, 1)
        if whole:
            return Shape(32, 128, 1, stages=3)
        return Shape(32, 128, min(8, max(2, -(-columns // 1024)) * 2))

    def _fitting(self, shape: Shape, x: Tensor, weights: int) -> Shape:
        """The same with fewer stages or rows, if its blocks of x and of so many weights are more than the memory holds."""
        for rows, stages in product((shape.rows, max(16, shape.rows // 2)), range(shape.stages, 1, -1)):
            block = (max(16, _power(len(x))) + weights * rows) * shape.columns * x.element_size()
            if (stages - 1) * block <= self._memory:
                break
        return replace(shape, rows=rows, stages=stages)

    def _product(self, x: Tensor, *weights: Tensor, whole: bool = False) -> Tensor:
        """[M, K] by weights [n, K] → [M, n …] in x's type, or the parts of it [SPLITS, M, n …] in float32."""
        counts = [weight.shape[0] for weight in weights] + [0] * (3 - len(weights))
        given = [*weights] + [weights[0]] * (3 - len(weights))
        rows, columns = len(x), x.shape[1]
        total = sum(counts)
        shape = self._fitting(self._shape(total, columns, whole), x, 1)
        steps = -(-columns // shape.columns)
        each = -(-steps // (1 if whole else shape.parts))
        parts = -(-steps // each)
        out = x.new_empty(rows, total) if whole else x.new_empty(parts, rows, total, dtype=torch.float32)
        blocks = sum(-(-count // shape.rows) for count in counts)
        self._kernels.product[(blocks, parts)](
            x, *given, out, rows, *counts, columns,
            STEPS=each, MB=max(16, _power(rows)), NB=shape.rows, KB=shape.columns, WHOLE=whole, PRECISION=self._precision,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        return out

    def _gated(self, x: Tensor, layer: Layer) -> Tensor:
        rows, columns = len(x), x.shape[1]
        inner = layer.gate.shape[0]
        shape = self._fitting(self._shape(2 * inner, columns, whole=True), x, 2)
        out = x.new_empty(rows, inner)
        self._kernels.gated[(-(-inner // shape.rows),)](
            x, layer.gate, layer.up, out, rows, inner, columns,
            STEPS=-(-columns // shape.columns), MB=max(16, _power(rows)), NB=shape.rows, KB=shape.columns,
            PRECISION=self._precision, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        return out

    def _attend(
        self, layer: Layer, x: Tensor, positions: Tensor, at: Tensor, columns: int, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Keys and values of the new tokens are written on the way. → [M, heads · size]"""
        layout = self._layout
        parts = self._product(x, layer.query[0], layer.key[0], layer.value[0])
        rows, new = positions.shape
        count, heads, size = len(x), layout.heads, layout.size
        chunk = max(COLUMNS, _power(-(-columns // MOST_CHUNKS)))  # few sizes: each is compiled
        chunks = -(-columns // chunk)
        out = x.new_empty(chunks + 1, count, heads, size, dtype=torch.float32)
        highest, totals = (x.new_empty(chunks + 1, count, heads, dtype=torch.float32) for _ in range(2))
        biases = [bias if bias is not None else parts for _, bias in (layer.query, layer.key, layer.value)]
        queries = new * (heads // layout.kv_heads)
        self._kernels.attend[(rows, layout.kv_heads, chunks + 1)](
            parts, *biases, keys, values, positions, at, layout.cos, layout.sin, out, highest, totals,
            count, new, chunks, layout.scale, len(layout.cos) - 1, *keys.stride()[:3], *values.stride()[:3],
            HEADS=heads, KV_HEADS=layout.kv_heads, SIZE=size, QB=16 if queries <= 16 else max(64, _power(queries)),
            TB=max(16, _power(new)), CB=COLUMNS, CHUNK=chunk, SPLITS=len(parts), BIAS=layer.biased,
            PRECISION=self._precision, num_warps=4, num_stages=2,
        )  # fmt: skip
        attended = x.new_empty(count, heads * size)
        self._kernels.combine[(count, heads)](
            out, highest, totals, attended, count, chunks + 1,
            HEADS=heads, SIZE=size, PB=_power(chunks + 1) if chunks < 8 else 2 * MOST_CHUNKS, num_warps=2,
        )  # fmt: skip
        return attended


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def lean_pass(model: TransformersModel) -> LeanPass | None:
    """The lean passes of a model on a GPU; None where it has none, or Triton is missing."""
    if model.device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        layout = layout_of(model)
    except torch.OutOfMemoryError:  # of its table of angles
        return None
    if layout is None:
        return None
    device: Any = torch.cuda.get_device_properties(model.device)
    try:
        return LeanPass(layout, device.multi_processor_count, getattr(device, "shared_memory_per_block_optin", LEAST_SHARED))
    except ImportError:
        return None
