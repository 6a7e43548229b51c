"""How many tokens to draft next, and by whom: fixed, optimal for a given alpha, or adapted to what is accepted."""

from outrider.draft_length.adaptive import AdaptiveLength
from outrider.draft_length.base import DraftLength, LengthState, Plan, Prospect, SimplePlan, Trial
from outrider.draft_length.fixed import FixedLength, optimal_length
from outrider.settings.drafting import MAX_DRAFT, OptimalLength

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
