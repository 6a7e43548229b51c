"""Torch's inference mode for a function, entered once where such functions call each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """As `torch.inference_mode()` decorates one, but that does some microseconds' work again in each call within."""
    entering: Callable[P, R] = torch.inference_mode()(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs) if torch.is_inference_mode_enabled() else entering(*args, **kwargs)

    return called
