"""What drafters that copy share: how a copy fares by the length of its match, and how it is offered.

A copy costs nothing and is known before it is asked for. Deterministic, hence a point mass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import lru_cache

from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.proposal import DraftRow, Proposal, padded_proposal
from outrider.settings.drafting import MAX_DRAFT

# Acceptance by the length of the match, first and later tokens, where the draft-length policy starts from (EXPERIMENTS.md):
# of greedy texts, on HumanEval completions of SmolLM2-135M and Qwen2.5-Coder-1.5B; of texts drawn at temperature 1, which
# repeat themselves less, on thirteen kinds of text of SmolLM2-135M. The last is of that length and all longer ones.
GREEDY = ((0.28, 0.72), (0.5, 0.77), (0.68, 0.8), (0.8, 0.8), (0.83, 0.82), (0.86, 0.84), (0.88, 0.85), (0.93, 0.95))
DRAWN = ((0.13, 0.45), (0.38, 0.52), (0.45, 0.58), (0.52, 0.63), (0.57, 0.7), (0.68, 0.73), (0.7, 0.76), (0.78, 0.8))


@dataclass
class CopyState:
    """A row's. drawn: how far its text is left to chance, from 0 (greedy) to 1 (temperature 1 and above)."""

    drawn: float = 0.0


@lru_cache(maxsize=1024)  # asked for in each round, of each row
def copy_prospect(name: str, length: int, drawn: float) -> Prospect:
    """What a copy after a match of this length promises; nothing for 0. drawn: see `CopyState`."""
    if length == 0:
        return Prospect(name, 0, 0.0, 0.0, longest=0, deterministic=True)
    kind = min(length, len(GREEDY))
    first, later = ((1.0 - drawn) * a + drawn * b for a, b in zip(GREEDY[kind - 1], DRAWN[kind - 1], strict=True))
    return Prospect(name, kind, first, later, longest=MAX_DRAFT, deterministic=True)


class CopyDrafter(Drafter):
    """Goes on as the text went on after an earlier occurrence of its end."""

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        drawn = 0.0 if context.sampling.greedy else min(1.0, context.sampling.temperature)
        for row in rows:
            row.state = self._start(drawn)

    @abstractmethod
    def _start(self, drawn: float) -> CopyState:
        """The state of a row that begins."""

    def preview(self, row: DraftRow, prospect: int, limit: int) -> list[int]:
        del prospect
        return self._continue(row, limit)

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        return padded_proposal(
            [self._continue(row, plan.limit) for row, plan in zip(rows, plans, strict=True)], context.device
        )

    @abstractmethod
    def _continue(self, row: DraftRow, limit: int) -> list[int]:
        """So many tokens after the match, or fewer; none without a match."""
