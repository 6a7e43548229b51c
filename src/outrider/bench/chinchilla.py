"""The shape of Chen et al. 2023, Figure 1, to hold a sweep against.

The figure's points are not printed, so its curves are redrawn by the method's own formulas from what the text states: the
target's 14.1 ms a token, the draft's 1.8 ms, and the tokens per loop at K = 4, which are 0.8 · 5 on HumanEval and 0.62 · 5
on XSum by the reading of the figure's middle panel in the toyllm article (2025). alpha is what gives these tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.theory import expected_tokens

TARGET_MS = 14.1
DRAFT_MS = 1.8
TOKENS_PER_LOOP = {"HumanEval": 0.8 * 5, "XSum": 0.62 * 5}  # at K = 4
MEASURED = {"HumanEval": 2.46, "XSum": 1.92}  # Table 1, nucleus, K = 4
REMARKS = (
    "Chen: the speed-up levels off or falls as K grows (XSum is best at K = 3), and its variance grows with K; redrawn from "
    "14.1 ms, 1.8 ms a drafted token and the tokens per loop at K = 4, where 2.46× (HumanEval) and 1.92× (XSum) were found"
)


@dataclass(frozen=True)
class Point:
    """At one K. relative_time: of plain decoding's time per token. efficiency: tokens per loop / (K + 1)."""

    loop_ms: float
    efficiency: float
    relative_time: float


def alpha_for(tokens: float, gamma: int) -> float:
    """The acceptance rate that gives so many tokens per round, by bisection of Leviathan Equation 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return low


def redrawn(domain: str, length: int) -> Point:
    """A point of the redrawn figure. domain: HumanEval or XSum."""
    tokens = expected_tokens(alpha_for(TOKENS_PER_LOOP[domain], 4), length)
    loop = TARGET_MS + length * DRAFT_MS
    return Point(loop, tokens / (length + 1), loop / tokens / TARGET_MS)
