"""Random tokens: the floor of what a draft can give (Leviathan 3.6), alpha = sum min(target, 1/V)."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.proposal import DraftRow, Proposal, empty_proposal
from outrider.sampling import race
from outrider.support.device_data import pad_rows


class RandomDrafter(Drafter):
    """Proposes tokens drawn uniformly from the target's vocabulary."""

    name = "random"

    def __init__(self) -> None:
        self._law: torch.Tensor | None = None

    def prospects(self, row: DraftRow) -> list[Prospect]:
        del row
        return [Prospect(self.name, first=0.01, later=0.01)]

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        size = context.vocab_size
        drafts = [_drawn(row, plan.limit, size) for row, plan in zip(rows, plans, strict=True)]
        if not any(drafts):
            return empty_proposal(len(rows), context.device)
        tokens, lengths = pad_rows(drafts, context.device)
        if self._law is None or (len(self._law), self._law.device) != (size, tokens.device):
            self._law = torch.full((size,), 1.0 / size, device=tokens.device)
        return Proposal(tokens, lengths, self._law.expand(*tokens.shape, size)).knowing(drafts)


def _drawn(row: DraftRow, count: int, vocabulary: int) -> list[int]:
    """So many tokens of a row; on the host, so that nothing is read back from a GPU."""
    if row.stream.key is None or not count:
        return [int(u * vocabulary) for u in row.stream.take(count)]
    alike = torch.ones(1, vocabulary, device="cpu").expand(count, -1)
    return race(alike, [row.stream.key] * count, range(row.position, row.position + count)).tolist()
