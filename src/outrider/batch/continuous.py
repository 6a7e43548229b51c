"""Requests of many clients through one model: a thread makes their rounds, and whoever has asked reads the answer."""

from __future__ import annotations

import atexit
import os
from collections import deque
from contextlib import suppress
from threading import Condition, Thread, current_thread
from typing import Self, Unpack
from weakref import WeakSet, finalize

from outrider.audio import Audio
from outrider.batch.answer import Answer, Asked
from outrider.batch.lanes import MIB, Lanes, Task
from outrider.drafters.base import check_alternatives
from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.generation import check_one, check_target
from outrider.models.base import TextModel
from outrider.request.choices import Draft, Length, bound_drafter, make_length
from outrider.request.invariance import tell_of_rounding
from outrider.request.options import GenerateOptions, Options, parse_options
from outrider.request.prompts import Prepared, Prompt, prepare
from outrider.support.alone import Alone
from outrider.support.checks import check_count

LAST_ROUNDS = 10.0  # seconds that the end of a process waits for the rounds under way


class ContinuousBatch:
    """Requests through one model, `batch_size` of them side by side; further ones wait, and join as places become free.

    >>> with ContinuousBatch(target, draft="auto", batch_size=8) as batch:  # doctest: +SKIP
    ...     answer = batch.submit("def fib(n):", temperature=0.8, max_new_tokens=64)
    ...     for piece in answer: print(piece, end="")

    Each request has options of its own, and all share the target's passes, however they are sampled. At a fixed draft
    length, or with `drafter_invariant`, a seed gives the text that it gives in `generate` (docs/batch.md says what rounding
    may do). An adapted length of a request that samples by a seed of its own follows from that request and the costs of
    passes of `batch_size` rows; others learn from each other, and follow what passes of as many rows as there are cost. (One
    of several drafters is chosen by such costs, too, and so is the length of drafts inside of a draft.)

    At the end of a `with` block all that was submitted is waited for; if it ends by an error, and by `close`, what is not
    done is cancelled.

    draft, num_draft_tokens: as in `generate`, for all requests. No drafter that remembers texts: what a client is answered
    would depend on the others'. prefix_cache: MiB of what has been read and written, that each model keeps, so that a
    prompt that begins like an earlier one need not be read again (docs/python.md). No weight may change meanwhile.
    """

    def __init__(
        self,
        target: TextModel,
        *,
        draft: Draft = "auto",
        num_draft_tokens: Length = None,
        batch_size: int = 8,
        prefix_cache: int = 0,
    ) -> None:
        check_target(target)
        check_count("batch_size", batch_size)
        check_count("prefix_cache", prefix_cache, 0)
        self.target = target
        drafter = bound_drafter(draft, target)
        if drafter is not None and drafter.remembers:
            raise ParameterError(
                f"draft {drafter.name} can't keep texts in a batch: what a client is answered would depend on the others'; "
                "leave memory and store out"
            )
        alone = Alone([target, *(drafter.engines() if drafter is not None else ())])
        length = alone.run(make_length, num_draft_tokens, target, drafter, batch_size)
        alone.run(check_alternatives, None, target, drafter)  # which runs the model, once: not while others do
        self._drafter = drafter
        self._given = (None if drafter is None else draft), num_draft_tokens
        self._worker = _Worker(Lanes(target, drafter, length, batch_size, prefix_cache * MIB), batch_size)
        finalize(self, self._worker.stop).atexit = False

    def submit(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """Ask for an answer. prompt and options as in `generate`, but for `draft` and `num_draft_tokens`, which are the
        batch's, and `cancelled`: `Answer.cancel`.

        Raises `OutriderError`s for what can be seen to be wrong with the request; what turns up later, the answer raises.
        """
        for name in ("draft", "num_draft_tokens", "cancelled"):
            if name in options:
                how = "call cancel() of its answer" if name == "cancelled" else "give it to ContinuousBatch, for all of them"
                raise ParameterError(f"{name} must be left out of a request: {how}")
        check_one(prompt, "submit", "submit each by itself")
        parsed = parse_options(1, {**options, "draft": self._given[0], "num_draft_tokens": self._given[1]})
        # What listens runs the model; what reads need not wait for the round under way.
        heard = isinstance(prompt, Audio)
        prepared = Alone([self.target] if heard else []).run(prepare, self.target, prompt)
        check_alternatives(parsed.alternatives, self.target, self._drafter)
        parsed.sampling.check_bias(self.target.vocab_size)
        if parsed.drafter_invariant and self._drafter is not None and not parsed.sampling.greedy:
            tell_of_rounding(self.target)
        asked = self._worker.put(prepared, parsed, repeatable=options.get("seed") is not None)
        return Answer(asked, self.target.tokenizer, self._worker.leave, self)

    @property
    def load(self) -> int:
        """How many answers are not done, those that wait for a place included."""
        return self._worker.load

    @property
    def open(self) -> bool:
        """Whether it takes requests."""
        return self._worker.open

    def close(self) -> None:
        """Cancel what is not done, and wait for the round under way."""
        self._worker.stop()
        self._worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._worker.finish()
        finally:
            self.close()


class _Worker:
    """The thread, and what it is told. It does not know the batch, which ends with its last reference."""

    def __init__(self, lanes: Lanes, batch_size: int) -> None:
        self._lanes, self._batch_size = lanes, batch_size
        self._changed = Condition()
        self._waiting: deque[Asked] = deque()
        self._left: deque[Asked] = deque()
        self._here: dict[Task, Asked] = {}
        self._finishing = self._stopping = False
        self._error: str | None = None  # by which the thread has ended
        self._thread = Thread(target=self._run, name="outrider-continuous-batch", daemon=True)
        self._thread.start()
        _workers.add(self)

    @property
    def load(self) -> int:
        return len(self._waiting) + len(self._here)

    @property
    def open(self) -> bool:
        return not self._stopping and not self._finishing and self._thread.is_alive()

    def renew(self) -> None:
        """Nobody holds its lock."""
        self._changed = Condition()

    def put(self, prepared: Prepared, options: Options, repeatable: bool) -> Asked:
        """Let a request join before the next round, or wait."""
        asked = Asked(self._lanes.task(prepared, options, repeatable=repeatable), self._thread)
        with self._changed:
            if self._error is not None:
                raise ModelError(f"the batch has ended by an error ({self._error}): make another ContinuousBatch")
            if self._stopping or self._finishing:
                raise ParameterError("requests must be submitted before the batch is closed: make another ContinuousBatch")
            if not self._thread.is_alive():
                raise ParameterError("requests must come from the process that made the batch: make one after the fork")
            self._waiting.append(asked)
            self._changed.notify_all()
        return asked

    def leave(self, asked: Asked) -> None:
        """Nobody wants it any more. The collector may call this anywhere, in the thread itself, too."""
        if not asked.left and not asked.over:
            asked.left = True
            self._left.append(asked)
            with self._changed:
                self._changed.notify_all()

    def stop(self) -> None:
        """Give up after the round under way."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until all is done, and take no more."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._thread.join()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, unless it is this one, or has not begun."""
        if self._thread is not current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._wait():
                self._round()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._end(error)

    def _wait(self) -> bool:
        """Until there is something to do; whether there is."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._here or self._left or self._finishing or self._stopping)
            return not self._stopping and bool(self._waiting or self._here or self._left)

    def _round(self) -> None:
        """One round of all that are here, after those that leave have gone and others have joined."""
        while self._left:
            self._drop(self._left.popleft())
        joining = []
        while self._waiting and len(self._here) < self._batch_size:
            asked = self._waiting.popleft()
            self._here[asked.task] = asked
            joining.append(asked.task)
        ended = self._lanes.admit(joining, read=False)
        try:
            ended += self._lanes.step()
        except Exception as error:  # of the pass itself: there is nothing to go on from, for anybody
            lost = self._lanes.tasks
            with suppress(Exception):  # the first error is told
                self._lanes.close()
            for task in lost:
                task.error = error
            ended += lost
        gone = [self._here.pop(task) for task in ended]
        for asked in self._here.values():
            asked.tell()
        for asked in gone:
            asked.tell(over=True)

    def _drop(self, asked: Asked) -> None:
        with suppress(ValueError):
            self._waiting.remove(asked)
        if self._here.pop(asked.task, None) is not None:
            try:
                self._lanes.drop(asked.task)
            except Exception as error:  # its drafter's: nobody else is to hear of it
                asked.task.error = error
        asked.tell(over=True)

    def _end(self, error: BaseException | None) -> None:
        """Nobody is to wait for what will not come."""
        with self._changed:
            self._stopping = True
            self._error = None if error is None else in_one_line(error)
            asked = [*self._here.values(), *self._waiting]
            self._here.clear()
            self._waiting.clear()
        try:
            self._lanes.close()
        finally:
            for one in asked:
                if error is not None:
                    one.task.error = ModelError(f"the batch has ended by an error ({self._error})")
                one.tell(over=True)


_workers: WeakSet[_Worker] = WeakSet()


def _forget_threads() -> None:
    """In a forked process, which has none of them: nobody is to wait for a lock that one of them held."""
    for worker in _workers:
        worker.renew()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@atexit.register
def _stop_all() -> None:
    """Before the interpreter takes apart what the threads are using."""
    for worker in list(_workers):
        worker.stop()
    for worker in list(_workers):
        worker.join(LAST_ROUNDS)
