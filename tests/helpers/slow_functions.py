"""Functions of a module, as worker processes need them."""

from __future__ import annotations

import os
import time

from outrider.speculation.workers import Context


def law(x: int) -> list[float]:
    return [0.2 + 0.1 * (x % 3), 0.5, 0.3 - 0.1 * (x % 3)]


def guess(x: int) -> list[float]:
    return [0.4, 0.4 - 0.1 * (x % 2), 0.2 + 0.1 * (x % 2)]


def step(x: int, sample: int) -> int:
    return 3 * x + sample


def second_for_certain(x: int) -> list[float]:
    time.sleep(0.05)  # the guess is being consumed by then
    return [0.0, 1.0]


def first_guessed(x: int) -> list[float]:
    return [1.0, 0.0]


def until_unwanted(x: int, sample: int, context: Context) -> float:
    """Sample 0 goes on until it is told that nobody wants it; → when it was told."""
    limit = time.monotonic() + 20.0
    while sample == 0 and not context.cancelled() and time.monotonic() < limit:
        time.sleep(0.005)
    return limit - time.monotonic()


def dies(x: int, sample: int) -> int:
    os._exit(3)


class UnsendableError(Exception):
    """Its constructor wants more than its arguments tell, so it can't be unpickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


def fails_unsendably(x: int) -> list[float]:
    raise UnsendableError("no law", "of a test")
