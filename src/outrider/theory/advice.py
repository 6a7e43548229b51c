"""What the closed forms say about one acceptance rate and one draft: the numbers, and the same in words.

Leviathan Equation 1, Theorems 3.8 and 3.11, Corollary 3.9 and Section 3.5, at one alpha, c and c_hat. Assumes what they do;
on a real engine verification is not flat, and `outrider calibrate` measures what it costs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from outrider import theory
from outrider.errors import ParameterError

LONGEST = 64
SHOWN = range(11)


@dataclass(frozen=True)
class Line:
    """One draft length: expected tokens per round, speed-up, growth of the operations, reads of the target's weights."""

    gamma: int
    tokens: float
    walltime_factor: float
    operations_factor: float
    memory_factor: float


@dataclass(frozen=True)
class Advice:
    """What to expect at `alpha`, `c` and `c_hat`.

    chosen: the line of the draft length asked for, or of the best. best_gamma: of 0 … 64, 0 if no draft length helps.
    guaranteed: (1 + alpha) / (1 + c), or None where alpha ≤ c. oracle, token_limit: infinite at alpha = 1 (and c = 0).
    """

    alpha: float
    c: float
    c_hat: float
    chosen: Line
    best_gamma: int
    best: Line
    guaranteed: float | None
    oracle: float
    token_limit: float
    lines: tuple[Line, ...]

    def to_dict(self) -> dict[str, Any]:
        """For machine-readable output: no number is infinite there but None."""
        values = asdict(self)
        for name in ("oracle", "token_limit"):
            values[name] = values[name] if math.isfinite(values[name]) else None
        return values


def advise(alpha: float, c: float, gamma: int | None = None, c_hat: float | None = None) -> Advice:
    """The closed forms at one point. gamma: 0 … 64, the best by default. c_hat: c by default."""
    if gamma is not None and not 0 <= gamma <= LONGEST:
        raise ParameterError(f"gamma must be in 0 … {LONGEST}, got {gamma}: longer drafts are never made")
    c_hat = c if c_hat is None else c_hat
    best = theory.best_gamma(alpha, c, LONGEST)
    return Advice(
        alpha=alpha,
        c=c,
        c_hat=c_hat,
        chosen=_line(alpha, best if gamma is None else gamma, c, c_hat),
        best_gamma=best,
        best=_line(alpha, best, c, c_hat),
        guaranteed=theory.minimal_walltime_factor(alpha, c) if alpha > c else None,
        oracle=max(1.0, theory.oracle_walltime_factor(alpha, c)),  # where a draft step is dearer, it drafts nothing
        token_limit=theory.limit_tokens(alpha),
        lines=tuple(_line(alpha, length, c, c_hat) for length in SHOWN),
    )


def _line(alpha: float, gamma: int, c: float, c_hat: float) -> Line:
    return Line(
        gamma,
        theory.expected_tokens(alpha, gamma),
        theory.walltime_factor(alpha, gamma, c),
        theory.operations_factor(alpha, gamma, c_hat),
        theory.memory_factor(alpha, gamma),
    )


def in_words(advice: Advice) -> list[str]:
    """The advice as sentences."""
    a = advice
    sentences = [
        f"A drafted token is accepted with probability α = {a.alpha:g}; drafting one costs c = {a.c:g} of a target step "
        f"in time and ĉ = {a.c_hat:g} in operations.",
        _about(a.chosen, "The best draft length" if a.chosen.gamma == a.best_gamma else "This draft length"),
    ]
    if a.best_gamma == 0:
        sentences.append("No draft length helps, since α ≤ c: a drafted token costs at least what it is expected to save.")
    elif a.best_gamma == LONGEST:
        sentences.append(f"{LONGEST} is the longest length considered; a longer one may be better still.")
    elif a.chosen.gamma != a.best_gamma:
        sentences.append(_about(a.best, "The best one"))
    if a.guaranteed is not None:
        sentences.append(f"Some length gives at least (1 + α)/(1 + c) = {a.guaranteed:.3f}× (Corollary 3.9).")
    limit = "no limit" if math.isinf(a.token_limit) else f"the limit 1/(1 − α) = {a.token_limit:.3f}"
    sentences.append(f"With longer and longer drafts the tokens per round have {limit}.")
    sentences.append(_about_oracle(a))
    sentences.append(
        "All this takes acceptances as independent and alike, and a target pass as costing the same for any number of "
        "tokens; `outrider calibrate` measures what it costs on your machine."
    )
    return sentences


def _about(line: Line, opening: str) -> str:
    faster = line.walltime_factor
    speed = f"{faster:.3f}× as fast as plain decoding" if faster >= 1 else f"slower than plain decoding, {faster:.3f}×"
    return (
        f"{opening}, γ = {line.gamma}: {line.tokens:.3f} tokens per round, {speed}, {line.operations_factor:.3f}× the "
        f"arithmetic operations, {line.memory_factor:.3f}× the reads of the target's weights."
    )


def _about_oracle(advice: Advice) -> str:
    if math.isinf(advice.oracle):
        return "An oracle that drafts exactly what is accepted would gain without bound (Section 3.5)."
    if advice.oracle == 1.0:
        return "Not even an oracle that drafts exactly what is accepted would gain (Section 3.5)."
    more = advice.oracle / advice.best.walltime_factor - 1.0
    return (
        f"An oracle that drafts exactly what is accepted would reach {advice.oracle:.3f}×, {100 * more:.0f} % above the "
        "best fixed length: the most that any choice of lengths can add (Section 3.5)."
    )
