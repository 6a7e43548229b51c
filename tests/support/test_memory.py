"""What the command line asks of glibc's allocator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.support import memory

_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ASK = """
import sys
from outrider.support import memory
assert memory.keep_freed_memory() and memory.ask_for_huge_pages()
import torch
held = [torch.ones(1 << 18) for _ in range(64)]
lines = open("/proc/self/smaps").read().split("[heap]")[1].splitlines()
print(next(line.split()[1] for line in lines if line.startswith("AnonHugePages")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux")
def test_what_is_allocated_comes_in_huge_pages_once_they_were_asked_for() -> None:
    if memory._glibc() is None:
        pytest.skip("another C library")
    out = subprocess.run([sys.executable, "-c", _ASK], check=True, capture_output=True, text=True).stdout.split()
    assert int(out[0]) >= 32 << 10 or "[never]" in _MODE.read_text()  # of 64 MB


@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux")
def test_where_addresses_are_limited_the_heap_does_not_grow_ahead() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, resource.RLIM_INFINITY))\n"
    ask = "from outrider.support import memory; print(memory.ask_for_huge_pages())"
    done = subprocess.run([sys.executable, "-c", limit + ask], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_where_there_is_no_such_allocator_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    assert not memory.keep_freed_memory()
    assert not memory.ask_for_huge_pages()


def test_a_system_that_does_not_tell_where_its_heap_is_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise OSError(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert memory._heap() is None
