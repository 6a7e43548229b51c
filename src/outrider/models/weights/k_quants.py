"""The weights of a GGUF file as it has them: in Q4_K and Q6_K, the formats that most files are in.

transformers reads such a file into floating point. Quantized again by another grid the weights would be others, and need
more bytes; so their rows are looked up in the file by what they hold, wherever a model has put them (side by side with
others, in another order, cut), and go into the kernels as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.models.weights.gguf_tensors import BLOCKS, damaged, gguf_tensors, mapped

if TYPE_CHECKING:
    from outrider.kernels.models import Kernels

COLUMNS = 256  # of a block
STEP = 8  # every so many columns of a row's first and last block are looked at first, to find it
ROWS = 4096  # that are in floating point at a time
SEED = 0


class KQuants:
    """Rows of the matrices in Q4_K and Q6_K of a file.

    dtype: what the file's numbers were rounded to when they were read. Raises `ModelError` for a damaged file.
    """

    def __init__(self, path: Path, kernels: Kernels, dtype: torch.dtype) -> None:
        self._ops = kernels.ops
        self._dtype = dtype
        matrices: dict[tuple[int, int], list[Tensor]] = {}  # [rows, blocks, bytes], by columns and bytes
        with mapped(path) as data:
            for each in gguf_tensors(data, path.name):
                if each.kind in BLOCKS and len(each.shape) == 2:
                    (columns, rows), size = each.shape, BLOCKS[each.kind]
                    blocks = columns // COLUMNS
                    end = each.start + rows * blocks * size
                    if not rows or not blocks or columns % COLUMNS or end > len(data):
                        raise damaged(path.name)
                    raw = torch.frombuffer(bytearray(data[each.start : end]), dtype=torch.uint8)
                    matrices.setdefault((columns, size), []).append(raw.view(rows, blocks, size))
        self._rows = {key: _Rows(found, self._floats) for key, found in matrices.items()}

    def of(self, weight: Tensor) -> Tensor | None:
        """The rows of a weight [out, in] as the file has them, [out, blocks, bytes]; None unless all are in one format."""
        columns = weight.shape[1]
        for size in BLOCKS.values():
            rows = self._rows.get((columns, size))
            found = None if rows is None else rows.of(weight)
            if found is not None:
                pairs = zip(_some(found), _some(weight), strict=True)
                if all(torch.equal(self._floats(raw), floats.float()) for raw, floats in pairs):
                    return found
        return None

    def _floats(self, raw: Tensor) -> Tensor:
        read: Tensor = self._ops.unpack_k(raw.contiguous())
        return read.to(self._dtype).float()


class _Rows:
    """Matrices of as many columns in one format. floats: of rows of blocks."""

    def __init__(self, matrices: list[Tensor], floats: Callable[[Tensor], Tensor]) -> None:
        self._matrices = matrices
        columns = matrices[0].shape[1] * COLUMNS
        self._looked_at = torch.arange(0, COLUMNS, STEP)
        if columns > COLUMNS:
            self._looked_at = torch.cat([self._looked_at, columns - COLUMNS + self._looked_at])
        keys = torch.cat(
            [_keys(floats(raw[:, [0, -1]])[:, ::STEP] if columns > COLUMNS else floats(raw)[:, ::STEP]) for raw in matrices]
        )
        which = torch.cat([torch.full((len(each),), i) for i, each in enumerate(matrices)])
        at = torch.cat([torch.arange(len(each)) for each in matrices])
        ordered = keys.sort().values
        self._alike = ordered[1:][ordered[1:] == ordered[:-1]]  # of rows that differ elsewhere, or not at all
        for i in _some(torch.isin(keys, self._alike).nonzero().flatten()):
            keys[i] += _keys(floats(self._gather(which[i], at[i])))
        self._keys, order = keys.sort()
        self._which, self._at = which[order], at[order]

    def of(self, weight: Tensor) -> Tensor | None:
        """The rows that a weight [out, in] consists of, if it does of these: to be compared."""
        keys = _keys(weight[:, self._looked_at].float())
        for i in _some(torch.isin(keys, self._alike).nonzero().flatten()):
            keys[i] += _keys(weight[i].float())
        found = torch.searchsorted(self._keys, keys).clamp_max(len(self._keys) - 1)
        return self._gather(self._which[found], self._at[found]) if torch.equal(self._keys[found], keys) else None

    def _gather(self, which: Tensor, at: Tensor) -> Tensor:
        rows = self._matrices[0].new_empty(len(which), *self._matrices[0].shape[1:])
        for i in set(which.tolist()):
            rows[which == i] = self._matrices[i][at[which == i]]
        return rows


def _some(rows: Tensor) -> list[Tensor]:
    """The same in parts."""
    return [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]


def _keys(some: Tensor) -> Tensor:
    """A number for each row of these columns in float32; of different rows hardly ever the same."""
    generator = torch.Generator().manual_seed(SEED)
    factors = torch.randint(-(1 << 62), 1 << 62, (some.shape[1],), generator=generator) * 2 + 1
    return (some.contiguous().view(torch.int32).long() * factors).sum(1)
