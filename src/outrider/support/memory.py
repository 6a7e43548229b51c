"""What a process can ask of the allocator of the C library, glibc's: to keep what is freed, and huge pages.

Asked by the command line and not by the library: a process has one allocator.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # glibc's malloc.h
_LARGEST = 32 << 20  # bytes: larger blocks are mapped one by one, whatever is asked
_AHEAD = 3 << 29  # bytes that the heap grows by; touched when they are needed
_KEPT = (2 << 30) - 1  # free bytes at the end of the heap that it keeps: the most that can be asked
_USUAL_PAD = 128 << 10
_MADV_HUGEPAGE = 14
_HEAP = "[heap]"
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def keep_freed_memory() -> bool:
    """Let glibc reuse freed memory instead of returning it to the system; → whether it could be asked.

    Temporaries of a vocabulary's size are freed in every round; given back, their pages are faulted in anew each time,
    which was a third of all sampling time at 152,000 tokens.
    """
    libc = _glibc()
    return libc is not None and bool(libc.mallopt(_M_TRIM_THRESHOLD, _KEPT) and libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST))


def ask_for_huge_pages() -> bool:
    """Have the heap in huge pages from now on, where the system gives them to who asks; → whether it could be asked.

    Weights are read once a pass, and a processor looks up the address of each page: with 4 KB a page that is 2 to 5 % of
    SmolLM2's pass. The heap grows by more than a gigabyte at once, so that it can be asked for all of that before it is
    touched; not where a process may only have so many addresses. After `keep_freed_memory`, or it would shrink again.
    """
    libc = _glibc()
    if libc is None or _limited() or not libc.mallopt(_M_TOP_PAD, _AHEAD):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.free(libc.malloc(_LARGEST - (1 << 20)))  # more than there is
    libc.mallopt(_M_TOP_PAD, _USUAL_PAD)
    heap = _heap()
    return heap is not None and libc.madvise(heap.start, len(heap), _MADV_HUGEPAGE) == 0


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        return libc if hasattr(libc, "mallopt") else None
    except (OSError, TypeError):
        return None


def _limited() -> bool:
    """Whether what is not touched counts, too: by a limit to addresses or the heap (`ulimit -v`, `-d`), or of the system."""
    with suppress(OSError):
        if _OVERCOMMIT.read_text().strip() == "2":
            return True
    try:
        import resource
    except ImportError:
        return False
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(each)[0] != resource.RLIM_INFINITY for each in limits)


def _heap() -> range | None:
    """Its addresses."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    where = next((line.split()[0] for line in lines if line.endswith(_HEAP)), None)
    return None if where is None else range(*(int(number, 16) for number in where.split("-")))
