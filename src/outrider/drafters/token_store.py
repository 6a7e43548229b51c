"""A file of token ids that only grows: outputs kept for later copying, by several processes at once if need be."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from outrider.errors import ParameterError
from outrider.support.file_lock import lock_file

_MAGIC = b"outrider-tokens-2 "
LAST = 1_000_000  # tokens read back: a few seconds to index


class TokenStore:
    """Appends sequences of ids (uint32, little endian) after a line that names the format and the tokenizer.

    tokenizer: its fingerprint (`models.compatibility`); a store that was written with another one is refused.
    """

    def __init__(self, path: Path, tokenizer: str) -> None:
        self.path = path.expanduser()
        self._head = _MAGIC + tokenizer.encode() + b"\n"
        try:
            with self._alone("a+b") as file:
                file.seek(0)
                head = file.read(len(self._head))
                if not head:  # new, or left so by a process that was killed
                    file.write(head := self._head)
        except OSError as error:
            raise ParameterError(f"store {path} can't be used ({error.strerror}): name another file") from None
        if not head.startswith(_MAGIC):
            raise ParameterError(f"store {path} is not a token store of outrider: name a new file")
        if head != self._head:
            raise ParameterError(f"store {path} was written with another tokenizer than the target's: name a new file")

    def read(self) -> list[int]:
        """The last tokens, at most `LAST` of them. A half-written last number is ignored."""
        count = self.count()
        with self.path.open("rb") as file:
            file.seek(len(self._head) + 4 * max(0, count - LAST))
            data = file.read(4 * min(count, LAST))
        return np.frombuffer(data, dtype="<u4").tolist()  # type: ignore[no-any-return]

    def count(self) -> int:
        """How many tokens it holds now."""
        return max(0, self.path.stat().st_size - len(self._head)) // 4

    def append(self, tokens: Many[int]) -> None:
        """Add a sequence at the end, over a half-written number if there is one."""
        try:
            with self._alone("r+b") as file:
                size = file.seek(0, 2) - len(self._head)
                file.seek(len(self._head) + size // 4 * 4)
                file.truncate()
                file.write(np.asarray(tokens, dtype="<u4").tobytes())
        except OSError as error:
            raise ParameterError(f"store {self.path} can't be written ({error.strerror}): name another file") from None

    @contextmanager
    def _alone(self, mode: Literal["a+b", "r+b"]) -> Iterator[BinaryIO]:
        """The file, to be read and written while no other process does so. mode: "a+b" makes it if need be."""
        with self.path.open(mode) as file:
            lock_file(file, wait=True)
            yield file
