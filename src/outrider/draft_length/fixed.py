"""Always the same number of tokens, as in both papers, and the number that is best for a known acceptance rate."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from outrider import theory
from outrider.costs import Costs, DraftSeconds
from outrider.draft_length.base import DraftLength, LengthState, Plan, Prospect, SimplePlan
from outrider.errors import ParameterError
from outrider.settings.drafting import MAX_DRAFT, check_length


@dataclass(frozen=True)
class FixedLength(DraftLength, LengthState):
    """The same number in every round, by the drafter's first prospect."""

    length: int

    def __post_init__(self) -> None:
        check_length(self.length)

    def start(self) -> LengthState:
        return self

    def plan(self, prospects: Many[Prospect], room: int, context: int) -> Plan:
        del context
        return SimplePlan(limit=min(self.length, prospects[0].longest, room))


def optimal_length(alpha: float, costs: Costs, drafting: DraftSeconds, longest: int = MAX_DRAFT) -> int:
    """The gamma with the greatest speed-up at measured costs for acceptance rate `alpha` (Leviathan 3.5); 0 if none helps.

    E[tokens] / (gamma · t_draft + t_verify(gamma + 1)), which is Leviathan's optimum where verification costs the same at
    any length.
    """
    if not (drafting.token >= 0 and drafting.start >= 0):
        raise ParameterError(f"drafting must take 0 seconds or more, got {drafting}")
    rates = [theory.expected_tokens(alpha, k) / (drafting.of(k) + costs.verify(k + 1)) for k in range(longest + 1)]
    return max(range(longest + 1), key=lambda k: (rates[k], -k))
