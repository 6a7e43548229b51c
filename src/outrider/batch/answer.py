"""What a client has of its request: the answer, and between it and the thread that makes rounds, the rounds alone.

Tokens become text where the answer is read: decoding them takes longer than it should beside a quick model's passes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from threading import Condition
from typing import Any, Self
from weakref import finalize

from outrider.batch.lanes import Task
from outrider.generation import Piece
from outrider.records import Origin, Round
from outrider.results import Result
from outrider.support.text import TextTracker


class Answer:
    """What a request is answered: iterate over its `Piece`s (`for`, or `async for`), or wait for its `result` (or `await`
    it). All of it is cancelled when the last reference goes.
    """

    def __init__(self, asked: Asked, tokenizer: Any, leave: Callable[[Asked], None], batch: object) -> None:
        self._asked, self._leave = asked, leave
        self._batch = batch  # which lives while somebody waits for it
        task = asked.task
        self._tracker = TextTracker(tokenizer, task.request.prompt, task.options.stop)
        self._origins: list[Origin] = []
        self._pieces: deque[Piece] = deque()
        finalize(self, leave, asked).atexit = False

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._asked.over

    def cancel(self) -> None:
        """Let it end after the round under way, with finish_reason "cancelled". Waits for nobody."""
        self._leave(self._asked)

    def result(self, timeout: float | None = None) -> Result:
        """All of it, when it is done. timeout: seconds, after which a `TimeoutError` is raised, and it goes on.

        Raises what it failed by: `NumericalError`, `ModelError`, what a processor raised, ….
        """
        if not self._asked.wait_for_end(timeout):
            raise TimeoutError(f"the answer is not done after {timeout:g} s: wait longer, or cancel() it")
        return self._asked.result()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        while not self._pieces:
            if not self._read():
                self._asked.wait()
            elif not self._pieces:
                raise self._asked.task.error or StopIteration
        return self._pieces.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if not self._read():
                await self._asked.change()
            elif not self._pieces:
                raise self._asked.task.error or StopAsyncIteration
        return self._pieces.popleft()

    def __await__(self) -> Generator[Any, None, Result]:
        while not self._asked.over:
            self._asked.take()
            yield from self._asked.change().__await__()
        return self._asked.result()

    def _read(self) -> bool:
        """Turn the rounds that have come into pieces; whether these are the last."""
        made, over = self._asked.take()
        for record in made:
            self._origins += record.origins
            self._tracker(record.tokens)
        if over:
            self._tracker.finish()
        self._pieces.extend(Piece(text, self._origins[token]) for text, token in self._tracker.take())
        return over


class Asked:
    """Between the thread and a client. over: nothing more will come. left: nobody wants it any more."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.over = self.left = False
        self._taken = 0  # rounds
        self._result: Result | None = None
        self._changed = Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def tell(self, over: bool = False) -> None:
        """Wake those who wait: rounds were made, or (over) the last one."""
        with self._changed:
            self.over = self.over or over
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, waiter in waiting:
            with suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(_resolve, waiter)

    def take(self) -> tuple[list[Round], bool]:
        """The rounds that were made since, and whether these are the last."""
        with self._changed:
            over, rounds = self.over, self.task.rounds[self._taken :]
            self._taken += len(rounds)
            return rounds, over

    def wait(self) -> None:
        """Until there is more than was taken."""
        with self._changed:
            self._changed.wait_for(self._is_new)

    def wait_for_end(self, timeout: float | None) -> bool:
        """→ whether it has come"""
        with self._changed:
            return self._changed.wait_for(lambda: self.over, timeout)

    def change(self) -> asyncio.Future[None]:
        """Done once there is more than was taken."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._is_new():
                waiter.set_result(None)
            else:
                self._waiting.append((loop, waiter))
        return waiter

    def result(self) -> Result:
        """Of one that is over."""
        if self.task.error is not None:
            raise self.task.error
        with self._changed:
            self._result = self._result or self.task.result()
            return self._result

    def _is_new(self) -> bool:
        return self.over or len(self.task.rounds) > self._taken


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
