"""What a client has of its request: the answer, and between it and the thread that makes rounds, the rounds alone.

Tokens become text where the answer is read: decoding them takes longer than it should beside a quick model's passes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from threading import TIMEOUT_MAX, Condition, Thread, current_thread
from types import TracebackType
from typing import Any, Self
from weakref import finalize

from outrider.batch.lanes import Task
from outrider.errors import ParameterError
from outrider.pieces import Piece, Pieces
from outrider.records import Round
from outrider.results import Result
from outrider.support.text import TextTracker


class Answer:
    """What a request is answered: iterate over its `Piece`s (`for`, or `async for`; one reader), or wait for its `result`
    (or `await` it). All of it is cancelled when the last reference goes.
    """

    def __init__(self, asked: Asked, tokenizer: Any, leave: Callable[[Asked], None], batch: object) -> None:
        self._asked, self._leave = asked, leave
        self._batch: object = batch  # which lives while somebody waits for it
        task = asked.task
        self._tracker = TextTracker(tokenizer, task.request.prompt, task.options.stop)
        self._made = Pieces(self._tracker)
        self._pieces: deque[Piece] = deque()
        self._last = finalize(self, leave, asked)
        self._last.atexit = False

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
        if timeout is not None and not isinstance(timeout, int | float):
            raise ParameterError(f"timeout must be a number of seconds, or None to wait for the end, got {timeout!r}")
        if not self._asked.wait_for_end(None if timeout is None or timeout > TIMEOUT_MAX else timeout):
            raise TimeoutError(f"the answer is not done after {timeout:g} s: wait longer, or cancel() it")
        return self._result()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        while (piece := self._next(StopIteration)) is None:
            self._asked.wait()
        return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while (piece := self._next(StopAsyncIteration)) is None:
            await self._asked.change()
        return piece

    def __await__(self) -> Generator[Any, None, Result]:
        while not self._asked.over:
            yield from self._asked.change(the_end=True).__await__()
        return self._result()

    def _next(self, end: type[Exception]) -> Piece | None:
        """The next piece, None if it has not come. Raises `end` after the last one, or what the answer failed by."""
        over = not self._pieces and self._read()
        if self._pieces:
            return self._pieces.popleft()
        if over:
            self._result()
            raise end
        return None

    def _result(self) -> Result:
        """What there is at the end, whose batch need not live for it any longer."""
        self._last.detach()
        self._batch, self._leave = None, _leave_nothing
        return self._asked.result()

    def _read(self) -> bool:
        """Turn the rounds that have come into pieces; whether these are the last."""
        made, over = self._asked.take()
        for record in made:
            self._made.add(record)
            self._tracker(record.tokens)
        if over:
            self._tracker.finish()
        self._pieces.extend(self._made.take())
        return over


def _leave_nothing(asked: Asked) -> None:
    """It is over."""


class Asked:
    """Between the thread that makes rounds and a client. over: nothing more will come. left: nobody wants it any more."""

    def __init__(self, task: Task, thread: Thread) -> None:
        self.task, self._thread = task, thread
        self.over = self.left = False
        self._taken = 0  # rounds
        self._result: Result | None = None
        self._where: TracebackType | None = None  # its error came from
        self._changed = Condition()
        self._waiting: list[_Waiting] = []

    def tell(self, over: bool = False) -> None:
        """Wake those who wait: rounds were made, or (over) the last one."""
        with self._changed:
            if over and not self.over and self.task.error is not None:
                self._where = _last_of(self.task.error.__traceback__)
                self.task.error.with_traceback(self._where)
            self.over = self.over or over
            self._changed.notify_all()
            waiting = [one for one in self._waiting if self.over or not one.the_end]
            self._waiting = [one for one in self._waiting if one not in waiting]
        for one in waiting:
            with suppress(RuntimeError):  # its loop is closed
                one.loop.call_soon_threadsafe(_resolve, one.waiter)

    def take(self) -> tuple[list[Round], bool]:
        """The rounds that were made since, and whether these are the last."""
        with self._changed:
            over, rounds = self.over, self.task.rounds[self._taken :]
            self._taken += len(rounds)
            return rounds, over

    def wait(self) -> None:
        """Until there is more than was taken."""
        self._check_thread()
        with self._changed:
            self._changed.wait_for(self._is_new)

    def wait_for_end(self, timeout: float | None) -> bool:
        """→ whether it has come"""
        self._check_thread()
        with self._changed:
            return self._changed.wait_for(lambda: self.over, timeout)

    def change(self, the_end: bool = False) -> asyncio.Future[None]:
        """Done once there is more than was taken, or only when it is over."""
        loop = asyncio.get_running_loop()
        one = _Waiting(loop, loop.create_future(), the_end)
        with self._changed:
            if self.over or (not the_end and self._is_new()):
                one.waiter.set_result(None)
            else:
                self._waiting.append(one)
                one.waiter.add_done_callback(lambda _: self._forget(one))
        return one.waiter

    def _forget(self, one: _Waiting) -> None:
        """Of one that waits no longer."""
        with self._changed, suppress(ValueError):
            self._waiting.remove(one)

    def _check_thread(self) -> None:
        if self._thread is current_thread() and not self.over:
            raise ParameterError("answers can't be waited for in the batch's own thread, by a processor: nothing would come")

    def result(self) -> Result:
        """Of one that is over."""
        error = self.task.error
        if isinstance(error, StopIteration | StopAsyncIteration):  # whoever iterates would take it for the end
            raise RuntimeError(f"the answer ended by {type(error).__name__}") from error
        if error is not None:
            raise error.with_traceback(self._where)  # or each call would make it longer
        with self._changed:
            self._result = self._result or self.task.result()
            return self._result

    def _is_new(self) -> bool:
        return self.over or len(self.task.rounds) > self._taken


def _last_of(where: TracebackType | None) -> TracebackType | None:
    """The places next to where an error came from; those before hold the batch and its models."""
    places = []
    while where is not None:
        places.append(where)
        where = where.tb_next
    return places[-2:][0] if places else None


@dataclass(eq=False)
class _Waiting:
    """A coroutine that waits, perhaps for the end alone."""

    loop: asyncio.AbstractEventLoop
    waiter: asyncio.Future[None]
    the_end: bool


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
