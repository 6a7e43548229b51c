"""What drafters that copy share: how a copy fares by the length of its match, and how it is offered.

A copy costs nothing and is known before it is asked for. Deterministic, hence a point mass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many

from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.proposal import DraftRow, Proposal, padded_proposal

# Acceptance by the length of the match, first and later tokens, on HumanEval completions of SmolLM2-135M and
# Qwen2.5-Coder-1.5B (EXPERIMENTS.md); where the draft-length policy starts from.
PRIORS = {
    1: (0.28, 0.72),
    2: (0.5, 0.77),
    3: (0.68, 0.8),
    4: (0.8, 0.8),
    5: (0.83, 0.82),
    6: (0.86, 0.84),
    7: (0.88, 0.85),
}
LONGEST_PRIOR = (0.93, 0.95)
LONGEST_KIND = 8


def copy_prospect(name: str, length: int) -> Prospect:
    """What a copy after a match of this length promises; nothing for 0."""
    kind = min(length, LONGEST_KIND)
    first, later = PRIORS.get(kind, LONGEST_PRIOR) if length else (0.0, 0.0)
    return Prospect(name, kind, first, later, longest=64 if length else 0, foretold=True)


class CopyDrafter(Drafter):
    """Goes on as the text went on after an earlier occurrence of its end."""

    def foretell(self, row: DraftRow, prospect: int, limit: int) -> list[int]:
        del prospect
        return self._continue(row, limit)

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        return padded_proposal(
            [self._continue(row, plan.limit) for row, plan in zip(rows, plans, strict=True)], context.device
        )

    @abstractmethod
    def _continue(self, row: DraftRow, limit: int) -> list[int]:
        """So many tokens after the match, or fewer; none without a match."""
