"""Files that are there whole or not at all, whoever reads, writes or stops meanwhile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_KEPT = 40  # characters of the name that are told by the temporary file's, which may not be too long


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file to be written, which takes the place of `path` at the end, or is gone if anything fails within.

    It lies in the same folder, under a name that no other writer has. A link stays, and what it leads to is replaced. The
    permissions are those of any new file. Raises `OSError` if it can't be written.
    """
    place = Path(os.path.realpath(path))
    partial = place.with_name(f".{place.name[:_KEPT]}.{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            yield file
        partial.replace(place)
    except BaseException:
        with suppress(OSError):  # it could not even be made
            partial.unlink()
        raise


def replace_whole(path: Path, data: bytes | str) -> None:
    """Write a file, as UTF-8 if it is text, in place of the one that is there. Raises `OSError` if it can't be written."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)
