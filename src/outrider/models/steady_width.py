"""Passes kept as wide as the one before: OpenVINO prepares every layer anew when a pass has another number of tokens.

That costs the 1.5B model in 4 bits about 13 ms of 55 and SmolLM2 in 8 bits 9 of 22 (EXPERIMENTS.md), more than scoring four
tokens too many; draft lengths that adapt, and rows that draft each for itself, would pay it in most rounds. So a narrower
pass is filled up, until what was filled in since the last full one exceeds a budget; then the width falls to the widest of
these. What is filled in comes last in its row and is taken back: no other token sees it.
"""

from __future__ import annotations

# Tokens filled in, by a simulation in EXPERIMENTS.md; a change costs as much as 5 (1.5B, int4) to 12 (SmolLM2, int8).
BUDGET = 16
NARROWEST = 2  # a row's lone token would go through other kernels, which round otherwise: another model, in effect


class SteadyWidth:
    """The width of the next pass, from those before: the tokens of all its rows."""

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

    def peek(self, tokens: int) -> int:
        """What `of` would give."""
        if not self.on or tokens >= self._last:
            return tokens
        return self._last if self._filled + self._last - tokens <= BUDGET else max(self._widest, tokens)
