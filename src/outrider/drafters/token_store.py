"""A file of token ids that only grows: outputs kept for later copying."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np

from outrider.errors import CacheFolderError, ParameterError

_MAGIC = b"outrider-tokens-1\n"
LAST = 1_000_000  # tokens read back: a second or two to index


class TokenStore:
    """Appends sequences of ids (uint32, little endian) after a line that names the format."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        if not self.path.exists():
            return
        try:
            with self.path.open("rb") as file:
                head = file.read(len(_MAGIC))
        except OSError as error:
            raise CacheFolderError(f"store {path} can't be read ({error.strerror}): name another file") from None
        if head != _MAGIC:
            raise ParameterError(f"store {path} is not a token store of outrider: name a new file")

    def read(self) -> list[int]:
        """The last tokens, at most `LAST` of them. A half-written last number is ignored."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()[len(_MAGIC) :]
        ids = np.frombuffer(data[: len(data) // 4 * 4], dtype="<u4")
        return ids[-LAST:].tolist()  # type: ignore[no-any-return]

    def append(self, tokens: Many[int]) -> None:
        """Add a sequence at the end."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                if file.tell() == 0:
                    file.write(_MAGIC)
                file.write(np.asarray(tokens, dtype="<u4").tobytes())
        except OSError as error:
            raise CacheFolderError(f"store {self.path} can't be written ({error.strerror}): name another file") from None
