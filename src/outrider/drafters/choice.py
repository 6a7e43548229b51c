"""Several drafters: in each round, for each row, the one with the best expected gain at this point.

Who is chosen depends on what is certain only (the prospects), so every proposal keeps its own exact law.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.checked import proposal_from, prospects_of
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel
from outrider.proposal import Candidate, DraftRow, Proposal, empty_proposal, merged_alternatives
from outrider.support.device_data import index


@dataclass(frozen=True)
class _Part:
    """The plan of one row as the drafter it is meant for sees it."""

    prospect: int
    limit: int
    gated: bool
    whole: Plan

    def go_on(self, signals: Many[int], others: Many[Many[float]] = ()) -> bool:
        return self.whole.go_on(signals, others)

    def choose(self, signals: Many[int], others: Many[Many[float]]) -> list[list[int]]:
        return self.whole.choose(signals, others)


@dataclass
class _Children:
    """A row as each drafter sees it, and how many prospects each offered last."""

    rows: list[DraftRow]
    counts: list[int]


class ChoiceDrafter(Drafter):
    """Offers the prospects of all its drafters; the draft-length policy picks one."""

    def __init__(self, drafters: Many[Drafter]) -> None:
        if not drafters:
            raise ParameterError("drafters must not be empty: give at least one")
        # A choice among others is as good as those that it has, and each of them can be made ready, timed and named apart.
        drafters = [part for one in drafters for part in (one.drafters if type(one) is ChoiceDrafter else [one])]
        names = [drafter.name for drafter in drafters]
        if len(set(names)) < len(names):
            raise ParameterError(
                f"drafters must have different names, got {', '.join(names)}: give each only once, and a model "
                "in one dtype and on one engine"
            )
        self.drafters: list[Drafter] = list(drafters)
        self.name = " + ".join(names)
        self.remembers = any(drafter.remembers for drafter in self.drafters)

    def bind(self, target: LanguageModel) -> None:
        for drafter in self.drafters:
            drafter.bind(target)

    def measure(self) -> None:
        for drafter in self.drafters:
            drafter.measure()

    def parts(self) -> list[Drafter]:
        return self.drafters

    def occasion(self) -> Many[int]:
        return [number for drafter in self.drafters for number in drafter.occasion()]

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        for row in rows:
            row.state = self.state_with({}, row)
        self.begin_but((), rows, context)

    def children(self, row: DraftRow) -> dict[int, DraftRow]:
        """A row as each of the drafters sees it, by the drafter's id."""
        return {id(part): child for part, child in zip(self.drafters, row.state.rows, strict=True)}

    def state_with(self, begun: Mapping[int, DraftRow], row: DraftRow) -> object:
        """The state of a row for which some of the drafters have begun: `children` of these."""
        return _Children([begun.get(id(part)) or _beginning(row) for part in self.drafters], [])

    def begin_but(self, ready: Many[Drafter], rows: Many[DraftRow], context: DraftContext) -> None:
        """Let the others begin."""
        for i, part in enumerate(self.drafters):
            if part not in ready:
                part.begin([row.state.rows[i] for row in rows], context)

    def prospects(self, row: DraftRow) -> list[Prospect]:
        offered = [prospects_of(drafter, _child(row, i)) for i, drafter in enumerate(self.drafters)]
        row.state.counts = [len(some) for some in offered]
        return [prospect for some in offered for prospect in some]

    def preview(self, row: DraftRow, prospect: int, limit: int) -> Iterable[int]:
        number, at = self._whose(row, prospect)
        return self.drafters[number].preview(_child(row, number), at, limit)

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        chosen = [self._part(row, plan) for row, plan in zip(rows, plans, strict=True)]
        parts: list[tuple[list[int], Proposal]] = []
        for number, drafter in enumerate(self.drafters):
            mine = [i for i, (who, part) in enumerate(chosen) if who == number and part.limit > 0]
            if mine:
                own = [_child(rows[i], number) for i in mine]
                parts.append((mine, proposal_from(drafter, own, [chosen[i][1] for i in mine], context)))
        return merged(parts, len(rows), context)

    def _part(self, row: DraftRow, plan: Plan) -> tuple[int, _Part]:
        """Which drafter a plan means, and the plan for it."""
        number, at = self._whose(row, plan.prospect)
        return number, _Part(at, plan.limit, plan.gated, plan)

    def _whose(self, row: DraftRow, prospect: int) -> tuple[int, int]:
        """The drafter that offered a prospect when it was asked last, and which of its own it is."""
        at = prospect
        for number, count in enumerate(row.state.counts):
            if at < count:
                return number, at
            at -= count
        raise ParameterError(f"prospect must be one of those offered, got {prospect}")

    def observe(self, rows: Many[DraftRow]) -> None:
        for i, drafter in enumerate(self.drafters):
            drafter.observe([_child(row, i) for row in rows])

    def end(self, row: DraftRow) -> None:
        with ExitStack() as stack:  # all of them end, whatever one of them raises
            for i, drafter in enumerate(self.drafters if row.state else ()):
                stack.callback(drafter.end, _child(row, i))


def _child(row: DraftRow, number: int) -> DraftRow:
    """The row as one of the drafters sees it; the tokens are shared."""
    own: DraftRow = row.state.rows[number]
    own.uncertain, own.drawn = row.uncertain, row.drawn
    return own


def merged(parts: list[tuple[list[int], Proposal]], rows: int, context: DraftContext) -> Proposal:
    """One proposal of all, of so many rows, from those of some of them each; a deterministic one among others gets its point
    masses written out.
    """
    if len(parts) == 1 and len(parts[0][0]) == rows:
        return parts[0][1]  # laws are not copied
    width = max((proposal.tokens.shape[1] for _, proposal in parts), default=0)
    if width == 0:
        return empty_proposal(rows, context.device)
    tokens = torch.zeros(rows, width, dtype=torch.long, device=context.device)
    lengths = [0] * rows
    signals: list[list[int]] = [[] for _ in range(rows)]
    candidates: list[list[Candidate]] = [[] for _ in range(rows)]
    laws = [proposal.probs for _, proposal in parts if proposal.probs is not None]
    probs = _empty_laws(laws, rows, width, context) if laws else None
    for mine, proposal in parts:
        at, count = index(mine, context.device), proposal.tokens.shape[1]
        tokens[at, :count] = proposal.tokens
        for j, i in enumerate(mine):
            lengths[i] = proposal.lengths[j]
            signals[i] = proposal.signals[j] if proposal.signals else []
            candidates[i] = proposal.candidates[j] if proposal.candidates else []
        if probs is not None:
            probs[at, :count] = _law(proposal, probs)
    beside = merged_alternatives([(mine, proposal.beside) for mine, proposal in parts], rows, context.device)
    return Proposal(tokens, lengths, probs, signals, beside, candidates)


def _empty_laws(laws: list[Tensor], rows: int, width: int, context: DraftContext) -> Tensor:
    dtype = laws[0].dtype
    for law in laws[1:]:
        dtype = torch.promote_types(dtype, law.dtype)
    return torch.zeros(rows, width, context.vocab_size, dtype=dtype, device=context.device)


def _law(proposal: Proposal, like: Tensor) -> Tensor:
    if proposal.probs is not None:
        return proposal.probs.to(like.dtype)
    shape = (*proposal.tokens.shape, like.shape[-1])
    return torch.zeros(shape, dtype=like.dtype, device=like.device).scatter_(-1, proposal.tokens.unsqueeze(-1), 1.0)


def _beginning(row: DraftRow) -> DraftRow:
    """The row as a drafter sees it that begins: tokens and numbers are shared."""
    return replace(row, state=None, uncertain=0, drawn=1, provisional=0)
