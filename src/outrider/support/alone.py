"""Engines in several threads: whoever runs passes of an engine holds its lock meanwhile.

An engine has one cache and is told by whoever calls it where a pass writes, so passes of two threads would write into each
other's sequences. A generation holds the locks of all its engines for a round at a time: those of several threads take
turns, and one that is not asked for its next round (a stream that nobody reads) keeps nobody waiting.

Python may end a generation anywhere, in the middle of another one's round, where a stream that was forgotten is collected.
That is put off until its thread holds no engine that others may want.

Locks are taken by `with` alone: between that and an `acquire` of our own an interrupt could leave one locked for good.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import RLock, local
from typing import ParamSpec, TypeVar
from weakref import WeakSet, finalize

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class OneAtATime:
    """Where one thread at a time works: `with place.lock`. A forked process has another lock, which nobody holds."""

    def __init__(self) -> None:
        self.lock = RLock()
        _all.add(self)


_all: WeakSet[OneAtATime] = WeakSet()


def _renew() -> None:
    """In a forked process: threads that held locks, and were working on their own sequences, are not there any more."""
    for place in _all:
        place.lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _Here(local):
    """Of a thread. held: its places; rounds: how many it is in the middle of; later: what is to be done after them."""

    def __init__(self) -> None:
        self.held: tuple[OneAtATime, ...] = ()
        self.rounds = 0
        self.later: list[tuple[Alone, Callable[[], object]]] = []


_here = _Here()
_places: dict[int, OneAtATime] = {}


def _place_of(engine: object) -> OneAtATime:
    """By its module, if it has one: engines around the same share what its layers hold during a pass."""
    key = getattr(engine, "module", engine)
    place = _places.get(id(key))
    if place is None:
        place = _places.setdefault(id(key), OneAtATime())
        with suppress(TypeError):  # it can't be watched: another one at its address will share its place, which harms nobody
            finalize(key, _places.pop, id(key), None).atexit = False
    return place


class Alone:
    """Some engines, on which no other thread works while `run` or `hold` does. Either may be called inside of them."""

    def __init__(self, engines: Iterable[object]) -> None:
        found = {id(place): place for place in map(_place_of, engines)}
        self._places = tuple(found[key] for key in sorted(found))  # in one order for everybody: no two wait for each other

    def run(self, work: Callable[P, T], *given: P.args, **more: P.kwargs) -> T:
        """Do what no end of a generation may come between: a round."""
        before = _here.rounds
        try:
            _here.rounds = before + 1
            return self._locked(0, lambda: work(*given, **more))
        finally:
            _here.rounds = before
            _catch_up()

    def hold(self, work: Callable[[], T]) -> T:
        """Do several rounds."""
        try:
            return self._locked(0, work)
        finally:
            _catch_up()

    def finish(self, work: Callable[[], object]) -> None:
        """What ends a generation and may be done twice: now, or later if this thread is at work on something else."""
        _here.later.append((self, work))
        _catch_up((self, work))

    @property
    def _may_finish(self) -> bool:
        """Whether waiting for the engines can block nobody, and no round of theirs is being made here."""
        return _here.rounds == 0 and (not _here.held or set(self._places) <= set(_here.held))

    def _locked(self, at: int, work: Callable[[], T]) -> T:
        if at < len(self._places):
            with self._places[at].lock:
                return self._locked(at + 1, work)
        before = _here.held
        try:
            _here.held = (*before, *self._places)
            return work()
        finally:
            _here.held = before


def _catch_up(mine: tuple[Alone, Callable[[], object]] | None = None) -> None:
    """Do what was put off, as far as it can be done now. mine: whose errors are the caller's."""
    while (one := next((one for one in _here.later if one[0]._may_finish), None)) is not None:
        try:
            _here.later.remove(one)
            one[0]._locked(0, one[1])
        except KeyboardInterrupt:
            if one not in _here.later:
                _here.later.append(one)
            raise
        except Exception as error:
            if one == mine:
                raise
            _log.warning("a generation could not be ended (%s: %s)", type(error).__name__, error)
