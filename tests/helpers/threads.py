"""Calls in threads of their own, and what stands for an engine where only its lock matters."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Engine:
    """Anything that can be weakly referred to."""


def side_by_side(calls: list[Callable[[], object]]) -> list[object]:
    """What each gives in a thread of its own."""
    found: list[object] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            found[i] = calls[i]()
        except BaseException as error:  # to be compared with what was wanted
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return found
