"""Speculation for any function: what runs at the same time, what is dropped, where a chain ends."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

import outrider
from outrider.errors import ParameterError
from tests.helpers import slow_functions


def test_slow_function_and_consumer_run_at_the_same_time() -> None:
    """Each waits for the other to have begun: one after the other would never end."""
    here, there = threading.Event(), threading.Event()

    def slow(x: int) -> list[float]:
        here.set()
        assert there.wait(20)
        return [1.0, 0.0]

    def consume(x: int, sample: int) -> int:
        there.set()
        assert here.wait(20)
        return sample

    with outrider.speculate(slow, lambda x: [1.0, 0.0], consume) as run:
        outcome = run(0)
    assert (outcome.value, outcome.accepted, outcome.beta) == (0, True, 1.0)


def test_further_steps_begin_on_guesses_that_are_not_decided() -> None:
    """The first law waits until the third step's consumer runs."""
    third = threading.Event()

    def slow(x: int) -> list[float]:
        assert x != 0 or third.wait(20)
        return [1.0, 0.0]

    def consume(x: int, sample: int) -> int:
        if x == 2:
            third.set()
        return x + 1

    with outrider.speculate(slow, lambda x: [1.0, 0.0], consume, lookahead=3) as run:
        assert [outcome.value for outcome in run.chain(0, 5)] == [1, 2, 3, 4, 5]


def test_a_redo_does_not_wait_for_the_consumer_of_the_guess() -> None:
    redone = threading.Event()

    def consume(x: int, sample: int) -> int:
        if sample == 0:
            assert redone.wait(20)
        else:
            redone.set()
        return sample

    with outrider.speculate(lambda x: [0.0, 1.0], lambda x: [1.0, 0.0], consume) as run:
        outcome = run(0)
    assert (outcome.value, outcome.accepted) == (1, False)


def test_a_consumer_is_told_that_nobody_wants_its_result() -> None:
    f = slow_functions
    for workers in ("threads", "processes"):
        with outrider.speculate(
            f.second_for_certain, f.first_guessed, f.until_unwanted, workers=workers, with_context=True
        ) as run:
            start = time.monotonic()
            assert run(0).accepted is False
        assert time.monotonic() - start < 15, "closing waits for processes: the one that loops must have been told"


def test_a_chain_ends_where_it_is_told_to() -> None:
    with outrider.speculate(lambda x: [1.0], lambda x: [1.0], lambda x, y: x + 1, lookahead=3) as run:
        assert [o.value for o in run.chain(0, 50, lambda value: None if value == 4 else value)] == [1, 2, 3, 4]
        assert list(run.chain(0, 0)) == []
        assert [o.value for o in itertools.islice(run.chain(0, 50), 2)] == [1, 2]
        assert [o.value for o in run.chain(7, 1)] == [8], "a chain that was left early does not block the next"


def test_two_chains_at_once_are_refused() -> None:
    with outrider.speculate(lambda x: [1.0], lambda x: [1.0], lambda x, y: x) as run:
        chain = run.chain(0, 3)
        next(chain)
        with pytest.raises(ParameterError, match="while another one runs"):
            run(0)
        chain.close()  # type: ignore[attr-defined]
        assert run(5).value == 5


def test_chains_made_before_they_begin_do_not_share_their_numbers() -> None:
    f = slow_functions
    with outrider.speculate(f.law, f.guess, f.step, lookahead=3, seed=1) as run:
        first, second = run.chain(0, 5), run.chain(0, 5)
        next(first)
        with pytest.raises(ParameterError, match="while another one runs"):
            next(second)
        assert len(list(first)) == 4


def test_after_close_nothing_is_started_again() -> None:
    f = slow_functions
    run = outrider.speculate(f.law, f.guess, f.step, seed=1)
    run(0)
    run.close()
    with pytest.raises(ParameterError, match="is closed"):
        run(0)
