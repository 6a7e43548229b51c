"""Runs of a measurement that a log may hold already: only what is missing is done, after a warm-up of each side."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict
from operator import attrgetter
from typing import Any, Generic, TypeVar

from outrider.support.run_log import RunLog

R = TypeVar("R")


class Resumed(Generic[R]):
    """The runs of a log, and those that are made after them.

    read: makes a run, a dataclass, of an entry's fields. key_of: what tells one run from others.
    """

    def __init__(self, log: RunLog, read: Callable[..., R], key_of: Callable[[R], Hashable] = attrgetter("key")) -> None:
        self._log = log
        self._done = {key_of(run): run for run in (read(**entry) for entry in log.entries)}
        self._warm: set[Hashable] = set()

    def held(self, key: Hashable) -> R | None:
        """The run with this key, if there is one."""
        return self._done.get(key)

    def keep(self, key: Hashable, run: R) -> R:
        """Take a new run into the log."""
        kept: Any = run
        self._log.append(asdict(kept))
        self._done[key] = run
        return run

    def run(
        self, key: Hashable, make: Callable[[], R], side: Hashable = None, warm_up: Callable[[], object] | None = None
    ) -> R:
        """The run with this key, made if there is none. warm_up: goes before the first one of its side that is made."""
        held = self.held(key)
        if held is not None:
            return held
        if warm_up is not None and side not in self._warm:
            warm_up()
            self._warm.add(side)
        return self.keep(key, make())
