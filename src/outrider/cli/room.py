"""What is said where a disk is full or memory lacks, in place of a traceback."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def what_lacks(error: Exception) -> str | None:
    """One line for an error of Python or of torch that says so, None for any other."""
    said = str(error).lower()
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        with suppress(OSError):  # an output that is no file of the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered would fail again at the end
        return f"the output can't be written ({error.strerror}): free some space, or write it elsewhere"
    if isinstance(error, MemoryError) or "can't allocate memory" in said or "cannot allocate memory" in said:
        return "there is not enough memory: take a smaller model or --dtype int4, or raise the limit (ulimit -v, -d)"
    return None
