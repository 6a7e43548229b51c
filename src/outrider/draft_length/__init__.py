"""How many tokens to draft next, and by whom: fixed, optimal for a given alpha, or adapted to what is accepted."""

from outrider.draft_length.adaptive import AdaptiveLength
from outrider.draft_length.base import MAX_DRAFT, DraftLength, LengthState, Plan, Prospect, SimplePlan, Trial
from outrider.draft_length.fixed import FixedLength, OptimalLength, optimal_length

__all__ = [
    "MAX_DRAFT",
    "AdaptiveLength",
    "DraftLength",
    "FixedLength",
    "LengthState",
    "OptimalLength",
    "Plan",
    "Prospect",
    "SimplePlan",
    "Trial",
    "optimal_length",
]
