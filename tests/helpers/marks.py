"""Cases for `make test-slow`, where `make test` has another of their kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of a parametrized test, or a value of one of its parameters, that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def thinned(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations of the values of parameters, of which `make test` has each `every`-th: of several parameters each
    value, not each pair; of a single one that share of its values. A value may have marks of its own.
    """
    combined = []
    params = [[one if hasattr(one, "marks") else pytest.param(one) for one in axis] for axis in axes]
    for placed in itertools.product(*(list(enumerate(axis)) for axis in params)):
        kept = sum(place for place, _ in placed) % every == 0
        marks = [mark for _, one in placed for mark in one.marks]
        combined.append(
            pytest.param(
                *(value for _, one in placed for value in one.values), marks=marks if kept else [*marks, pytest.mark.slow]
            )
        )
    return combined
