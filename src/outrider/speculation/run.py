"""Stochastic speculative execution (Leviathan Section 6, Discussion): f gives the law of g's input; run both at once.

Draw a guess y* from an approximation f*(x), start g(x, y*) and f(x) together, and keep the guess with probability
min(1, f / f*), else draw y from (f - f*)+ and run g(x, y). y follows f(x) exactly (`verify`, Leviathan A.1), and what is
returned is g's value of y. In a chain, where the next x comes of g's value, the next steps can begin on a guess that is not
decided yet: `lookahead` of them, decided in order, as speculative decoding does with tokens.

Every step has randomness of its own, by (seed, number of the step, rejections before it): a sample is a function of x, of
the guessed law and of these numbers, the numbers of different steps are independent, and so a chain follows its law whatever
was guessed on the way. A step that is begun again after an earlier rejection takes other numbers than before: the first ones
have steered what was computed since, and a `fast` that remembers any of it would guess knowing them. So the samples do not
depend on timing, lookahead or workers, unless `fast` itself does, and follow slow's law in any case.

The price: work on a rejected guess is wasted, and its *side effects stay*. A consumer must be a function of its arguments:
carry the state of an environment in x and in the value, or copy it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from outrider.errors import ParameterError
from outrider.settings.seed import check_seed
from outrider.speculation.laws import Decision, Law, as_law, decide
from outrider.speculation.workers import Job, Workers, generator, wait_for_any
from outrider.support.checks import check_count

MAX_LOOKAHEAD = 64
_GUESS, _DECISION, _CONSUMER = range(3)  # what a step's numbers are for; consumers: one key a run


@dataclass(frozen=True)
class Outcome:
    """One step that counts.

    sample: drawn from slow(x). value: of the consumer on it. accepted: whether the guess was kept; None where nothing was
    guessed. beta: sum min(slow, fast), None for densities. seconds: of "slow", "fast" and "consume", the run that counts,
    as they took beside each other.
    """

    step: int
    x: Any
    sample: Any
    value: Any
    accepted: bool | None
    beta: float | None
    seconds: dict[str, float]


def speculate(
    slow: Callable[[Any], Any],
    fast: Callable[[Any], Any],
    consume: Callable[..., Any],
    *,
    lookahead: int = 1,
    workers: str = "threads",
    max_workers: int | None = None,
    with_context: bool = False,
    seed: int | np.random.Generator | None = None,
) -> Speculation:
    """Run `consume` on a guess while `slow` still computes the law that the sample is drawn from; exact in law.

    slow(x) → a law; fast(x) → a guess at that law, quick (it runs in the calling thread); consume(x, sample) → a value.
    Laws: probabilities as tensor, array or list (samples are indices), a mapping {outcome: probability}, a frozen
    scipy.stats distribution, or a `Density`, see `speculation.laws`. Samples follow slow's law, whatever fast gives.
    lookahead: steps of a chain begun before the oldest is decided, 0 … 64; 0 runs one after the other, without guesses.
    workers: "threads" (for functions that release the interpreter's lock: torch, NumPy, input and output) or "processes"
    (functions of a module). max_workers: 2 · lookahead + 1 by default, so that nothing waits for work that is not wanted.
    with_context: consume(x, sample, context) gets a `Context` with randomness of its own and `cancelled()`.
    seed: 0 … 2^63 - 1, a generator to take one from, or None for a random one. fast may remember and learn, but not know an
    earlier run with the same seed: it would guess by the numbers that judge its guess.

    In threads consume may run twice at a time (a redo beside the rejected guess), and slow up to `lookahead` times.
    Exceptions of a rejected guess, and of steps begun on it, are dropped; all others are raised where the step counts.
    Use as a context manager, or call `close`.

    >>> with speculate(lambda x: [0.5, 0.5], lambda x: [0.6, 0.4], lambda x, y: x + y, seed=1) as run:
    ...     run(10).value in (10, 11)
    True
    """
    return Speculation(slow, fast, consume, lookahead, workers, max_workers, with_context, seed)


class Speculation:
    """Made by `speculate`. Not for several threads or several chains at once."""

    def __init__(
        self,
        slow: Callable[[Any], Any],
        fast: Callable[[Any], Any],
        consume: Callable[..., Any],
        lookahead: int,
        workers: str,
        max_workers: int | None,
        with_context: bool,
        seed: int | np.random.Generator | None,
    ) -> None:
        for name, function in (("slow", slow), ("fast", fast), ("consume", consume)):
            if not callable(function):
                raise ParameterError(f"{name} must be a function, got {type(function).__name__}")
        check_count("lookahead", lookahead, 0, MAX_LOOKAHEAD)
        if max_workers is not None:
            check_count("max_workers", max_workers, 2)
        self.seed = int(seed.integers(2**63)) if isinstance(seed, np.random.Generator) else check_seed(seed)
        self._fast = fast
        self._lookahead = lookahead
        self._workers = Workers(slow, consume, with_context, workers, max_workers or 2 * lookahead + 1)
        self._taken = 0  # steps that are decided
        self._dropped = 0  # how often steps that were begun were given up: part of the key of what is begun next
        self._running = False

    def __enter__(self) -> Self:
        if self._lookahead:
            self._workers.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give threads or processes back."""
        self._workers.close()

    def __call__(self, x: Any) -> Outcome:
        """One sample from slow(x) and the consumer's value of it."""
        return next(self.chain(x, 1))

    def chain(self, x: Any, steps: int, then: Callable[[Any], Any] = lambda value: value) -> Iterator[Outcome]:
        """Up to `steps` steps, each one's x from the value before it: then(value), where None ends the chain.

        then must be a function of the value: it is asked about values of guesses, too.
        """
        check_count("steps", steps, 0)
        self._check_alone()
        return self._plain(x, steps, then) if self._lookahead == 0 else self._speculative(x, steps, then)

    def _check_alone(self) -> None:
        """Chains side by side would take the same random numbers."""
        if self._running:
            raise ParameterError("chain must not be begun while another one runs: use it up or close it first")

    def _plain(self, x: Any, steps: int, then: Callable[[Any], Any]) -> Iterator[Outcome]:
        functions = self._workers.functions
        for _ in range(steps):
            number, self._taken = self._taken, self._taken + 1
            given, slow_seconds = functions.run_slow(x)
            sample = as_law(given, "slow").sample(generator(self.seed, number, _GUESS))
            value, seconds = functions.run_consume(x, sample, (self.seed, number, _CONSUMER), 0)
            yield Outcome(number, x, sample, value, None, None, {"slow": slow_seconds, "fast": 0.0, "consume": seconds})
            x = then(value)
            if x is None:
                return

    def _speculative(self, x: Any, steps: int, then: Callable[[Any], Any]) -> Iterator[Outcome]:
        self._check_alone()  # again: chains may be made first and begun later, side by side
        self._running, ended = True, False
        begun: deque[_Step] = deque()
        try:
            for left in range(steps, 0, -1):
                if not begun:
                    begun.append(self._begin(x))
                self._until_decidable(begun, left, then)
                outcome = self._settle(begun)
                yield outcome
                if not begun and left > 1:
                    x = then(outcome.value)
                    if x is None:
                        break
            ended = True
        finally:
            _drop(begun)
            self._dropped += not ended
            self._running = False

    def _begin(self, x: Any, after: _Step | None = None) -> _Step:
        """Start a step: slow first, since the guess may take a moment, too."""
        number, again = self._taken if after is None else after.number + 1, self._dropped
        step = _Step(number, x, self._workers.slow(x))
        start = time.perf_counter()
        try:
            step.law = as_law(self._fast(x), "fast")
            step.guess = step.law.sample(generator(self.seed, number, _GUESS, again))
            step.consumed = self._workers.consume(x, step.guess, (self.seed, number, _CONSUMER, again))
        except Exception as error:  # whether it matters is known when the steps before are decided
            step.error = error
        step.fast_seconds = time.perf_counter() - start
        return step

    def _until_decidable(self, begun: deque[_Step], left: int, then: Callable[[Any], Any]) -> None:
        """Begin further steps on guesses until the oldest step's law is known (or it is known to have failed)."""
        oldest = begun[0]
        while True:
            self._extend(begun, left, then)
            if oldest.error is not None or oldest.slow.future.done():
                return
            last = begun[-1]
            waiting = [oldest.slow]
            if len(begun) < min(self._lookahead, left) and last.may_go_on and last.consumed is not None:
                waiting.append(last.consumed)
            wait_for_any(waiting)

    def _extend(self, begun: deque[_Step], left: int, then: Callable[[Any], Any]) -> None:
        while len(begun) < min(self._lookahead, left):
            last = begun[-1]
            if not last.may_go_on or last.consumed is None or not last.consumed.future.done():
                return
            last.may_go_on = False
            if last.consumed.failed():
                return
            try:
                x = then(last.consumed.result()[0])
            except Exception:  # asked again, and raised, if the guess is kept
                return
            if x is None:
                return
            begun.append(self._begin(x, last))

    def _settle(self, begun: deque[_Step]) -> Outcome:
        """Decide the oldest step. After a rejection nothing that was begun on it is left."""
        step = begun.popleft()
        self._taken = step.number + 1  # whatever comes of it, no number serves twice
        try:
            if step.error is not None:
                raise step.error
            given, slow_seconds = step.slow.result()
            decision = self._decide(step, as_law(given, "slow"))
            job = step.consumed
            if not decision.accepted:
                _drop(begun, step)
                self._dropped += 1
                job = self._workers.consume(step.x, decision.sample, (self.seed, step.number, _CONSUMER + 1))
            assert job is not None
            value, seconds = job.result()
        except BaseException:
            _drop(begun, step)
            raise
        times = {"slow": slow_seconds, "fast": step.fast_seconds, "consume": seconds}
        return Outcome(step.number, step.x, decision.sample, value, decision.accepted, decision.beta, times)

    def _decide(self, step: _Step, target: Law) -> Decision:
        assert step.law is not None
        return decide(target, step.law, step.guess, generator(self.seed, step.number, _DECISION))


@dataclass
class _Step:
    """A step that is not decided. law: of the guess. error: of fast. may_go_on: the next may begin on its guess."""

    number: int
    x: Any
    slow: Job
    law: Law | None = None
    guess: Any = None
    consumed: Job | None = None
    error: Exception | None = None
    fast_seconds: float = 0.0
    may_go_on: bool = True


def _drop(begun: deque[_Step], *others: _Step) -> None:
    """None of it is wanted any more."""
    for step in (*begun, *others):
        step.slow.cancel()
        if step.consumed is not None:
            step.consumed.cancel()
    begun.clear()
