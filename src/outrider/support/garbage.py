"""When Python looks for garbage: not while libraries are imported, which make a million objects that all stay.

Looking through them again and again takes a fifth of the time until torch and transformers are there, and a second at the
end of a process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SELDOM = (1_000_000, 20, 100)  # objects made since the last time, and times, as in `gc.set_threshold`


@contextmanager
def uncollected() -> Iterator[None]:
    """No collection inside; afterwards as it was."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Collector:
    """The same for a process of ours, where imports are spread over what a command does."""

    def __init__(self) -> None:
        self._usual: tuple[int, int, int] | None = None

    def start(self) -> None:
        """Look seldom from now on; a command that loads no model needs it no more than that."""
        self._usual = gc.get_threshold()
        gc.set_threshold(*_SELDOM)

    def loaded(self) -> None:
        """Look as often as usual from now on, but not through what there is by now. Nothing where it was not started."""
        if self._usual is not None:
            gc.freeze()
            gc.set_threshold(*self._usual)

    def end(self) -> None:
        """The process ends, and what there is with it. Not with Triton, which reports what is left of it as leaks."""
        if "triton" in sys.modules:
            gc.unfreeze()
        else:
            gc.freeze()


collector = Collector()
