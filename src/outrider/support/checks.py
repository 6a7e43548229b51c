"""Numbers that a user gives, checked in one way everywhere: a line with the name, the range, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real

from outrider.errors import ParameterError


def check_number(name: str, value: object, low: float, high: float, allowed: str, remedy: str) -> None:
    """Raise `ParameterError` unless `value` is a number in [low, high]; NaN and booleans never are."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)  # NumPy's as well
    except OverflowError:  # a whole number beyond all floats
        number = math.nan
    if not low <= number <= high:
        raise ParameterError(f"{name} must be {allowed}, got {value!r}: {remedy}")


def check_count(name: str, value: object, low: int = 1, high: int | None = None, remedy: str = "") -> None:
    """Raise `ParameterError` unless `value` is a whole number in low … high, None for no end; booleans never are."""
    whole = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)  # NumPy's as well
    if whole is None or whole < low or (high is not None and whole > high):
        reach = f"of {low} or more" if high is None else f"in {low} … {high}"
        advice = f": {remedy}" if remedy else ""
        raise ParameterError(f"{name} must be a whole number {reach}, got {value!r}{advice}")


def check_switch(name: str, value: object) -> bool:
    """The value as a boolean; None is no."""
    if value is not None and value not in (False, True):  # NumPy's and 0 and 1 as well
        raise ParameterError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def unknown_option(name: str, known: Iterable[str], function: str) -> ParameterError:
    """The error for a keyword that a function does not have: the one that it was meant for, if one is close, else all."""
    among = sorted(known)
    meant = get_close_matches(name, among, 1)
    remedy = f"did you mean {meant[0]}? All are in" if meant else f"its options are {', '.join(among)}: see"
    return ParameterError(f"{name!r} is not an option of {function}: {remedy} help(outrider.{function})")


def check_choice(name: str, value: str, among: Iterable[str]) -> str:
    """The value itself if it is one of these, else an error that lists them."""
    if value not in (known := list(among)):
        raise ParameterError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value
