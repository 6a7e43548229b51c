"""Engines in several threads: whoever runs passes of an engine holds its lock meanwhile.

An engine has one cache and is told by whoever calls it where a pass writes, so passes of two threads would write into each
other's sequences. A generation holds the locks of all its engines for a round at a time: those of several threads take
turns, and one that is not asked for its next round (a stream that nobody reads) keeps nobody waiting. A lock alone would
let the thread that has just made a round make the next one, too, before another one has woken up: it gives way first.

Python may end a generation anywhere, in the middle of another one's round, where a stream that was forgotten is collected.
That is put off until its thread holds no engine that others may want. Whoever leaves a generation, a client that has gone,
need not wait for a round of others either: the thread that makes it frees what was left.

Locks are taken by `with` alone: between that and an `acquire` of our own an interrupt could leave one locked for good.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock, get_ident, local
from typing import ParamSpec, TypeVar
from weakref import WeakSet, finalize

P = ParamSpec("P")
T = TypeVar("T")
MOMENT = 5e-5  # seconds: a thread that waits for a lock wakes up within that
PATIENCE = 0.05  # seconds for which a thread gives way: a machine may be so busy that those who wait are not woken
_log = logging.getLogger(__name__)


class OneAtATime:
    """Where one thread at a time works: `with place.lock`. A forked process has another lock, which nobody holds.

    holder: the thread that is at work, as `Alone` knows it. last: the one that was last. waiting: those that wait. left:
    what others have left to whoever holds it.
    """

    def __init__(self) -> None:
        self.left: deque[Later] = deque()
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Nobody is there."""
        self.lock = RLock()
        self.holder: int | None = None
        self.last: int | None = None
        self.waiting: set[int] = set()

    @property
    def taken(self) -> bool:
        """Whether a thread is at work, or about to be."""
        return self.holder is not None or bool(self.waiting)

    def give_way(self) -> None:
        """Let those who wait come first, if this thread was the last one."""
        until = time.monotonic() + PATIENCE
        while self.waiting and self.last == get_ident() and time.monotonic() < until:
            time.sleep(MOMENT)


_all: WeakSet[OneAtATime] = WeakSet()


def _renew() -> None:
    """In a forked process: threads that held locks, and were working on their own sequences, are not there any more."""
    for place in _all:
        place.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _Here(local):
    """Of a thread. held: its places; rounds: how many it is in the middle of; later: what is to be done after them."""

    def __init__(self) -> None:
        self.held: tuple[OneAtATime, ...] = ()
        self.rounds = 0
        self.later: list[Later] = []


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
            self._take_over()
            _catch_up()

    def hold(self, work: Callable[[], T]) -> T:
        """Do several rounds."""
        try:
            return self._locked(0, work)
        finally:
            self._take_over()
            _catch_up()

    def finish(self, work: Callable[[], object], wait: bool = True) -> None:
        """What ends a generation and may be done twice: now, or later if this thread is at work on something else.

        wait: for other threads; if not, one that is at work on these engines does it after its round, and tells its errors.
        """
        if globals()["_here"] is None:  # the interpreter is ending, and has taken this module apart
            return
        if not wait and (busy := self._busy()) is not None:
            busy.left.append((self, work))
            if busy.taken:  # if it has just ended its round, it may not have seen this
                return
            self._take_over()
        else:
            _here.later.append((self, work))
        _catch_up((self, work))

    @contextmanager
    def ending(self, work: Callable[[], object]) -> Iterator[None]:
        """Around the rounds of a generator: `finish` after them, and no waiting for whoever reads no further."""
        try:
            yield
        except GeneratorExit:
            self.finish(work, wait=False)
            raise
        except BaseException:
            self.finish(work)
            raise
        self.finish(work)

    def _leave(self, one: Later) -> None:
        """To whoever has these engines next, this thread or another."""
        if one not in _here.later:
            (self._places[0].left if self._places else _here.later).append(one)

    def _busy(self) -> OneAtATime | None:
        """Where another thread is at work, or comes first."""
        return next((place for place in self._places if place.taken and place.holder != get_ident()), None)

    def _take_over(self) -> None:
        """What was left while others could not have these places. Two threads may take the same: it may be done twice."""
        for place in self._places:
            while (one := next(iter(tuple(place.left)), None)) is not None:
                _here.later.append(one)
                with suppress(ValueError):  # another thread was quicker
                    place.left.remove(one)

    @property
    def _may_finish(self) -> bool:
        """Whether waiting for the engines can block nobody, and no round of theirs is being made here."""
        return _here.rounds == 0 and (not _here.held or set(self._places) <= set(_here.held))

    def _locked(self, at: int, work: Callable[[], T]) -> T:
        if at == len(self._places):
            return work()
        place, me, before = self._places[at], get_ident(), _here.held
        if place.holder == me:
            with place.lock:
                return self._locked(at + 1, work)
        try:
            # Said before it is true, one place after the other: what the collector ends meanwhile may wait for this one as
            # well, but for none that comes later.
            _here.held = (*before, place)
            place.give_way()
            place.waiting.add(me)
            with place.lock:
                return self._held(at, work)
        finally:
            _here.held = before  # first: after the call an interrupt may come
            place.waiting.discard(me)

    def _held(self, at: int, work: Callable[[], T]) -> T:
        """Go on with the lock of a place that this thread did not have before."""
        place, me = self._places[at], get_ident()
        try:
            place.holder = place.last = me
            place.waiting.discard(me)  # after that: it is taken without a gap (`finish`)
            return self._locked(at + 1, work)
        finally:
            place.holder = None


Later = tuple[Alone, Callable[[], object]]


def _catch_up(mine: Later | None = None) -> None:
    """Do what was put off, as far as it can be done now. mine: whose errors are the caller's."""
    while (one := next((one for one in _here.later if one[0]._may_finish), None)) is not None:
        try:
            _here.later.remove(one)
            one[0]._locked(0, one[1])
        except KeyboardInterrupt:
            one[0]._leave(one)
            raise
        except Exception as error:
            if one == mine:
                raise
            _log.warning("a generation could not be ended (%s: %s)", type(error).__name__, error)
        one[0]._take_over()  # what was left meanwhile
