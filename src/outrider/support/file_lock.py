"""Files that one process at a time writes."""

from __future__ import annotations

import logging
from functools import cache
from typing import IO, Any

_log = logging.getLogger(__name__)


def lock_file(file: IO[Any], wait: bool) -> bool:
    """Keep other processes that ask for it from an open file until it is closed, or this process ends.

    wait: for another one that holds it; False is returned otherwise. Where nothing can be locked, the answer is True: on
    Windows, and, with one warning a file, on file systems that know no locks.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        _warn(str(file.name), error.strerror)
    return True


@cache  # once
def _warn(name: str, reason: str | None) -> None:
    _log.warning("%s can't be locked (%s): let no other process write it meanwhile", name, reason)
