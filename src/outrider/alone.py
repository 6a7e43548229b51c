"""Engines in several threads: whoever runs passes of an engine holds its lock meanwhile.

An engine has one cache and is told by whoever calls it where a pass writes, so passes of two threads would write into each
other's sequences. A generation holds the locks of all its engines for a round at a time: those of several threads take
turns, and one that is not asked for its next round (a stream that nobody reads) keeps nobody waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock, RLock
from types import TracebackType
from weakref import WeakKeyDictionary

_locks: WeakKeyDictionary[object, RLock] = WeakKeyDictionary()
_finding = Lock()


class Alone:
    """A context in which no other thread is in one about any of these engines. May be entered again inside of itself."""

    def __init__(self, engines: Iterable[object]) -> None:
        with _finding:
            found = {id(lock): lock for lock in (_locks.setdefault(engine, RLock()) for engine in engines)}
        self._own = [found[key] for key in sorted(found)]  # in one order for everybody: no two wait for each other

    def __enter__(self) -> None:
        held = 0
        try:
            for lock in self._own:
                lock.acquire()
                held += 1
        except BaseException:  # an interrupt while it waited
            for lock in reversed(self._own[:held]):
                lock.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for lock in reversed(self._own):
            lock.release()
