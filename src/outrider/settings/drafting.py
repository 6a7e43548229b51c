"""How many tokens may be drafted, beside which alternatives, and how strictly they are judged."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ParameterError
from outrider.support.checks import check_count, check_number

MAX_DRAFT = 64
MOST_ALTERNATIVES = 16


@dataclass(frozen=True)
class OptimalLength:
    """The fixed length that is best for an acceptance rate, once the costs are known (`draft_length.optimal_length`)."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ParameterError(f"alpha must be in [0, 1], got {self.alpha}: it is a mean acceptance probability")


def check_length(length: object) -> None:
    """Raise `ParameterError` unless so many tokens can be drafted in a round."""
    check_count("num_draft_tokens", length, 0, MAX_DRAFT)


def check_count_of_alternatives(count: object) -> None:
    """Raise `ParameterError` unless so many tokens can be scored in each drafted one's place."""
    check_count("alternatives", count, 0, MOST_ALTERNATIVES)


def check_without_drafts(lenience: float, alternatives: int | None) -> None:
    """Raise `ParameterError` for options that say something about drafted tokens alone, where nothing is drafted."""
    if lenience < 1.0:
        raise ParameterError(f"lenience must be 1 without a draft, got {lenience:g}: it is about accepting drafted tokens")
    if alternatives:
        raise ParameterError(f"alternatives must be 0 without a draft, got {alternatives}: they stand beside drafted tokens")


def check_lenience(lenience: float) -> float:
    """The lenience itself; raises `ParameterError` unless it is in (0, 1]."""
    check_number("lenience", lenience, 1e-6, 1.0, "in (0, 1], at least 1e-6", "use 1 for the exact rule")
    return float(lenience)
