"""Speculation for any function: whose exceptions surface, and what is one clear line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

import outrider
from outrider.errors import OutriderError, ParameterError
from tests.helpers import slow_functions


def raising_at(bad: int) -> Callable[[int, int], int]:
    def consume(x: int, sample: int) -> int:
        if sample == bad:
            raise ZeroDivisionError("inside the consumer")
        return sample

    return consume


def test_exceptions_of_a_rejected_guess_do_not_surface() -> None:
    with outrider.speculate(lambda x: [0.0, 1.0], lambda x: [1.0, 0.0], raising_at(0), lookahead=2) as run:
        assert [outcome.value for outcome in run.chain(0, 3)] == [1, 1, 1]


@pytest.mark.parametrize("guessed", [[1.0, 0.0], [0.0, 1.0]])
def test_exceptions_of_the_sample_that_counts_do_surface(guessed: list[float]) -> None:
    with outrider.speculate(lambda x: [1.0, 0.0], lambda x: guessed, raising_at(0), lookahead=2) as run:
        with pytest.raises(ZeroDivisionError, match="inside the consumer"):
            run(0)
        with pytest.raises(ZeroDivisionError):
            run(1)


@pytest.mark.parametrize("where", ["slow", "fast", "then"])
def test_exceptions_of_steps_begun_on_a_rejected_guess_do_not_surface(where: str) -> None:
    """x = 10 is only reached by the guess, and everything fails there."""
    met = threading.Event()

    def slow(x: int) -> list[float]:
        if x == 10 and where == "slow":
            met.set()
            raise ZeroDivisionError
        assert x != 0 or met.wait(20)
        return [0.0, 1.0]

    def fast(x: int) -> list[float]:
        if x == 10 and where == "fast":
            met.set()
            raise ZeroDivisionError
        return [1.0, 0.0]

    def then(value: int) -> int:
        if value == 10 and where == "then":
            met.set()
            raise ZeroDivisionError
        return value

    with outrider.speculate(slow, fast, lambda x, y: 10 if y == 0 else 20, lookahead=2, seed=1) as run:
        assert [outcome.value for outcome in run.chain(0, 1 + 1, then)] == [20, 20]


@pytest.mark.parametrize("where", ["slow", "fast", "then"])
def test_exceptions_of_steps_that_count_surface(where: str) -> None:
    def fails(here: str) -> Callable[[int], Any]:
        def function(x: int) -> Any:
            if x == 2 and here == where:
                raise ZeroDivisionError(here)
            return x if here == "then" else [1.0]

        return function

    with outrider.speculate(fails("slow"), fails("fast"), lambda x, y: x + 1, lookahead=4) as run:
        chain = run.chain(0, 6, fails("then"))
        assert [next(chain).value, next(chain).value] == [1, 2]
        with pytest.raises(ZeroDivisionError, match=where):
            next(chain)


def test_a_worker_process_that_dies_is_one_clear_line() -> None:
    f = slow_functions
    with (
        outrider.speculate(f.law, f.guess, f.dies, workers="processes", max_workers=2) as run,
        pytest.raises(OutriderError, match="worker process"),
    ):
        run(0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"slow": [1.5, -0.5]}, "slow gave no probabilities"),
    "not a number": ({"fast": [float("nan"), 1.0]}, "fast gave no probabilities"),
    "another sum": ({"slow": [0.5, 0.4]}, "sum 0.9"),
    "nothing": ({"fast": []}, "a probability for each outcome"),
    "a matrix": ({"slow": torch.ones(2, 2)}, r"got shape \[2, 2\]"),
    "a word": ({"slow": "heads"}, "slow must give probabilities"),
    "of other length": ({"slow": [0.5, 0.25, 0.25]}, "over as many outcomes, got 3 and 2"),
    "of another kind": ({"slow": stats.norm()}, "distributions of one kind, got density and finite"),
    "only one mapping": ({"slow": {0: 1.0}}, "must both give mappings"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_law_is_one_clear_line(name: str) -> None:
    given, message = BAD[name]
    laws = {"slow": [0.5, 0.5], "fast": [0.5, 0.5], **given}
    with (
        outrider.speculate(lambda x: laws["slow"], lambda x: laws["fast"], lambda x, y: y) as run,
        pytest.raises(OutriderError, match=message),
    ):
        run(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead": -1}, "lookahead must be a whole number in 0 … 64, got -1"),
        ({"lookahead": True}, "lookahead"),
        ({"workers": "fibres"}, "workers must be one of threads, processes, got 'fibres'"),
        ({"workers": "processes"}, "must be functions of a module"),
        ({"max_workers": 1}, "max_workers must be a whole number of 2 or more, got 1"),
        ({"seed": -1}, "seed"),
        ({"slow": [0.5, 0.5]}, "slow must be a function, got list"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"slow": lambda x: [1.0], "fast": lambda x: [1.0], "consume": lambda x, y: y, **options}
    with pytest.raises(ParameterError, match=message):
        outrider.speculate(**given)


def test_continuous_and_discrete_laws_are_not_mixed() -> None:
    with (
        outrider.speculate(lambda _: stats.poisson(3), lambda _: stats.norm(3, 1.7), lambda _, y: y, seed=1) as run,
        pytest.raises(ParameterError, match="one kind, got discrete and continuous"),
    ):
        run(0)


def test_an_exception_that_can_not_be_sent_is_told_and_ends_nothing() -> None:
    f = slow_functions
    with outrider.speculate(f.fails_unsendably, f.guess, f.step, workers="processes", max_workers=2, seed=1) as run:
        for _ in range(2):
            with pytest.raises(OutriderError, match="UnsendableError: no law because of a test"):
                run(0)
