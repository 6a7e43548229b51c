"""What a GGUF file is and holds, and where: gguf's own reader takes 16 s for a vocabulary of 150,000 tokens.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ModelError

STRING, ARRAY = 8, 9  # the format's numbers for types
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # in bytes, of the others
Q4_K, Q6_K = 12, 14
BLOCKS = {Q4_K: 144, Q6_K: 210}  # bytes of 256 columns
_LONGEST = 1 << 16  # bytes of a name, in the format
_ALIGNMENT = 32  # unless the file says another


@dataclass(frozen=True)
class GgufTensor:
    """shape: the last dimension first, as the format has them. kind: its number of the type. start: in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def read(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from("<" + form, self._data, self.at)
        self.at += struct.calcsize("<" + form)
        return found

    def text(self) -> str:
        (size,) = self.read("Q")
        if size > _LONGEST:
            raise ValueError(f"a name of {size} bytes")
        self.at += size
        return self._data[self.at - size : self.at].decode(errors="replace")

    def skip(self, kind: int) -> None:
        if kind == STRING:
            (size,) = self.read("Q")
            self.at += size
        elif kind == ARRAY:
            of, count = self.read("IQ")
            if of in _SIZES:
                self.at += count * _SIZES[of]
            else:
                for _ in range(count):
                    self.skip(of)
        else:
            self.at += _SIZES[kind]


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """The bytes of a file that is there. Raises `ModelError` for an empty one."""
    if not path.stat().st_size:
        raise damaged(path.name)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def gguf_tensors(data: mmap.mmap, name: str) -> list[GgufTensor]:
    """All of a file's. Raises `ModelError` for one that can't be read."""
    header = _Header(data)
    try:
        _, _, tensors, entries = header.read("IIQQ")
        alignment = _ALIGNMENT
        for _ in range(entries):
            key, (kind,) = header.text(), header.read("I")
            if key == "general.alignment":
                (alignment,) = struct.unpack_from("<I", data, header.at)
            header.skip(kind)
        found = []
        for _ in range(tensors):
            title, (dimensions,) = header.text(), header.read("I")
            shape = header.read(f"{dimensions}Q")
            kind, offset = header.read("IQ")
            found.append((title, shape, kind, offset))
        start = -(-header.at // alignment) * alignment
    except (struct.error, KeyError, RecursionError, OverflowError, ValueError, ZeroDivisionError) as error:
        raise damaged(name) from error
    return [GgufTensor(title, shape, kind, start + offset) for title, shape, kind, offset in found]


def architecture(data: mmap.mmap) -> str | None:
    """What a file says it is, if it says so first, as writers do."""
    header = _Header(data)
    header.at = 24  # magic, version, number of tensors and of entries
    try:
        key, (kind,) = header.text(), header.read("I")
        return header.text() if key == "general.architecture" and kind == STRING else None
    except (struct.error, ValueError):
        return None


def damaged(name: str) -> ModelError:
    """What a header or a table that makes no sense is told as."""
    return ModelError(f"model {name} can't be read as GGUF (it is damaged): download it again")
