"""Cases for `make test-slow`, where `make test` has another of their kind."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case of a parametrized test, or a value of one of its parameters, that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)
