"""Costs, plans and rounds for the tests of draft lengths."""

from __future__ import annotations

from outrider.costs import Costs, SharedCosts
from outrider.draft_length import AdaptiveLength, Prospect
from outrider.records import Round

FLAT = Costs({1: 1.0, 17: 1.0})
LINEAR = Costs({1: 1.0, 17: 17.0})
DEAR = Costs({1: 1.0, 17: 17.0}, rows=4)


def one_row_left() -> AdaptiveLength:
    """Of several rows none drafts; as soon as one is alone it does."""
    return AdaptiveLength(DEAR, by_rows=lambda rows: SharedCosts(FLAT if rows == 1 else DEAR))


def plan_of(policy: AdaptiveLength, *prospects: Prospect, room: int = 64, context: int = 0) -> tuple[int, int]:
    plan = policy.start().plan(prospects, room, context)
    return plan.prospect, plan.limit


def rounds_of(*accepted: int, drafted: int = 4) -> list[Round]:
    return [Round(tuple(range(a + 1)), drafted, a, "d") for a in accepted]
