"""What clients of a `ContinuousBatch` ask for, and what goes wrong with it."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

PROMPTS = ("the quick brown fox", "a b a b a", "one two three one", "zebra", "abc", "the man")
ENDLESS: dict[str, Any] = {"max_new_tokens": 5000, "ignore_eos": True}  # longer than any test waits; to be cancelled


class MineError(Exception):
    pass


class Gate:
    """A processor that waits before the law of some token, for 60 s at most."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        self.asked += 1
        if self.asked == self.at:
            self.reached.set()
            assert self.opened.wait(60)
        return logits
