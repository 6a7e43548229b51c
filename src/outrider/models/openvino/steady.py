"""Passes kept as wide as the one before: OpenVINO prepares every layer anew when a pass has another width.

That costs the 1.5B model in 4 bits about 13 ms of 55 (EXPERIMENTS.md), more than scoring four tokens too many; draft lengths
that adapt would pay it in most rounds. So a narrower pass is filled up, until what was filled in since the last full one
exceeds a budget; then the width falls to the widest of these. What is filled in comes last and is taken back: no other token
sees it.
"""

from __future__ import annotations

BUDGET = 8  # tokens filled in; chosen, not tuned


class SteadyWidth:
    """The width of the next pass, from those before."""

    def __init__(self) -> None:
        self.on = True
        self._last = 0
        self._filled = 0
        self._widest = 0

    def forget(self) -> None:
        """A pass of another kind came between: nothing is to be kept."""
        self._last = 0

    def of(self, tokens: int) -> int:
        """How wide to make a pass of that many tokens; at least that many."""
        if not self.on:
            return tokens
        if tokens < self._last:
            self._filled += self._last - tokens
            self._widest = max(self._widest, tokens)
            if self._filled <= BUDGET:
                return self._last
            tokens = self._widest
        self._last, self._filled, self._widest = tokens, 0, 0
        return tokens
