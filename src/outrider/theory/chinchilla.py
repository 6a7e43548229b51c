"""Chen et al. 2023 in numbers: what the text states of Chinchilla and its draft, and the shape of Figure 1 from it.

The figure's points are not printed, so its curves are redrawn by the method's own formulas from what the text states: the
target's 14.1 ms a token, the draft's 1.8 ms, and the tokens per loop at K = 4, which are 0.8 · 5 on HumanEval and 0.62 · 5
on XSum by the reading of the figure's middle panel in the toyllm article (2025). alpha is what gives these tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.theory.closed_forms import alpha_from_tokens, efficiency, expected_tokens, loop_seconds

TARGET_MS = 14.1
DRAFT_MS = 1.8
TOKENS_PER_LOOP = {"HumanEval": 0.8 * 5, "XSum": 0.62 * 5}  # at K = 4
TOKEN_MS = {"HumanEval": 5.73, "XSum": 7.52}  # Table 1, nucleus, K = 4
TARGET = (70e9, 80, 8192)  # parameters, layers, width; the draft's by Table 2
DRAFT = (4e9, 8, 6144)
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


def alpha_of(domain: str) -> float:
    """The acceptance rate at which K = 4 gives the tokens per loop of the figure. domain: HumanEval or XSum."""
    return alpha_from_tokens(TOKENS_PER_LOOP[domain], 4)


def loop_ms(length: int) -> float:
    """Milliseconds of a loop with `length` drafted tokens."""
    return 1000 * loop_seconds(length, DRAFT_MS / 1000, TARGET_MS / 1000)


def redrawn(domain: str, length: int) -> Point:
    """A point of the redrawn figure. domain: HumanEval or XSum."""
    alpha, loop = alpha_of(domain), loop_ms(length)
    return Point(loop, efficiency(alpha, length), loop / expected_tokens(alpha, length) / TARGET_MS)
