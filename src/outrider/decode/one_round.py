"""A decoder's part in a round: what is drafted for its rows, what the rule keeps of it, and the records."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from outrider.decode.row import Row
from outrider.draft_length import Trial
from outrider.draft_length.base import Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.checked import proposal_from, prospects_of
from outrider.drafters.choice import merged
from outrider.proposal import Proposal, empty_proposal
from outrider.records import PHASES, Round
from outrider.round import Group, Outcome, Scorer
from outrider.round.told import best, own


class OneRound:
    """Of rows that are sampled alike, whatever was made ready to draft for each of them. Made, it has drafted; `settle` when
    they are scored, then `records`.

    failing_alone: a row that has no law ends (`Row.error`), instead of the round.
    """

    def __init__(self, rows: Many[Row], context: DraftContext, scorer: Scorer, failing_alone: bool) -> None:
        self._rows, self._failing_alone = rows, failing_alone
        self._alike = by_drafter(rows)
        self._prospects, proposal = _propose(rows, self._alike, context)
        self.group = Group(scorer, [row.draft for row in rows], proposal)
        self._kept: list[tuple[Row, Outcome, int]] = []

    def settle(self, outcomes: Many[Outcome]) -> None:
        """Let the rows, their sequences and the drafter go on with what is kept."""
        for row, outcome in zip(self._rows, outcomes, strict=True):
            count = self._extend(row, outcome.tokens)
            row.draft.drawn = 2 if outcome.taken and count == len(outcome.tokens) else 1
            self._kept.append((row, outcome, count))
        for row in self._rows:
            # Scored: the old newest token and the draft. Still true of the row: all but its new newest token.
            row.sequence.truncate(min(row.sequence.length, len(row.tokens) - 1))
        for drafter, at in self._alike:
            if drafter is not None:
                drafter.observe([self._rows[i].draft for i in at])

    def _extend(self, row: Row, tokens: list[int]) -> int:
        try:
            return row.extend(tokens)
        except Exception as error:  # no law, or a stop check that raises
            if not self._failing_alone:
                raise
            row.fail(error)
            return 0

    def records(self, seconds: dict[str, float], close: Callable[[Row], None]) -> list[tuple[int, Round]]:
        """What each row did, but for those that failed; policies learn from it, and rows that have ended are closed.

        seconds: of the round, a row's share.
        """
        records, proposal = [], self.group.proposal
        for i, (row, outcome, count) in enumerate(self._kept):
            if row.error is None:
                prospect = self._prospects[i] if proposal.lengths[i] else None
                record = _record(row, outcome, count, prospect, seconds, proposal, i, self.group.scorer)
                row.length.update(
                    Trial(
                        prospect,
                        record.drafted,
                        record.tested,
                        record.accepted,
                        record.signals or (),
                        came(proposal, i, outcome),
                        record.alternatives,
                        record.taken,
                    )
                )
                records.append((row.number, record))
            if row.finish_reason is not None:
                self._close(row, close)
        return records

    def _close(self, row: Row, close: Callable[[Row], None]) -> None:
        try:
            close(row)
        except Exception as error:  # its drafter's
            if not self._failing_alone:
                raise
            row.fail(row.error or error)


def by_drafter(rows: Many[Row]) -> list[tuple[Drafter | None, list[int]]]:
    """What was made ready for some of the rows, and which of them they are."""
    found: dict[int, tuple[Drafter | None, list[int]]] = {}
    for i, row in enumerate(rows):
        found.setdefault(id(row.drafter), (row.drafter, []))[1].append(i)
    return list(found.values())


def _propose(
    rows: Many[Row], alike: list[tuple[Drafter | None, list[int]]], context: DraftContext
) -> tuple[Many[Prospect | None], Proposal]:
    """What each row's policy wants, drafted. → the prospects chosen, the proposal"""
    chosen: list[Prospect | None] = [None] * len(rows)
    parts: list[tuple[list[int], Proposal]] = []
    for drafter, at in alike:
        if drafter is None:
            continue
        some, proposal = _propose_by(drafter, [rows[i] for i in at], context)
        for i, prospect in zip(at, some, strict=True):
            chosen[i] = prospect
        if any(proposal.lengths):
            parts.append((at, proposal))
    return chosen, merged(parts, len(rows), context)


def _propose_by(drafter: Drafter, rows: Many[Row], context: DraftContext) -> tuple[Many[Prospect], Proposal]:
    prospects = [prospects_of(drafter, row.draft) for row in rows]
    plans = [row.plan(offered) for row, offered in zip(rows, prospects, strict=True)]
    for row, offered, plan in zip(rows, prospects, plans, strict=True):
        row.follow(drafter, offered, plan)
    chosen = [offered[plan.prospect] for offered, plan in zip(prospects, plans, strict=True)]
    if not any(plan.limit for plan in plans):
        return chosen, empty_proposal(len(rows), context.device)
    return chosen, proposal_from(drafter, [row.draft for row in rows], plans, context)


def _record(
    row: Row,
    outcome: Outcome,
    kept: int,
    prospect: Prospect | None,
    seconds: dict[str, float],
    proposal: Proposal,
    i: int,
    scorer: Scorer,
) -> Round:
    told, extras = None if outcome.told is None else outcome.told[: kept * scorer.extras.told], scorer.extras
    return Round(
        tokens=tuple(outcome.tokens[:kept]),
        drafted=proposal.lengths[i],
        accepted=outcome.accepted,
        drafter=prospect.drafter if prospect is not None else None,
        seconds={phase: seconds[phase] for phase in PHASES},
        logprobs=None if told is None else own(told, extras),
        top_logprobs=None if told is None else best(told, extras),
        betas=None if outcome.betas is None else tuple(outcome.betas),
        drafts=None if outcome.drafts is None else tuple(outcome.drafts),
        signals=tuple(proposal.signals[i]) if proposal.signals and proposal.signals[i] else None,
        finish_reason=row.finish_reason,
        lenience=scorer.lenience,
        lenient=outcome.lenient,
        alternatives=0 if proposal.beside is None else proposal.beside.count(i),
        taken=outcome.taken,
    )


def came(proposal: Proposal, i: int, outcome: Outcome) -> list[tuple[int, bool]]:
    """Of each candidate of row i in whose place the rule decided, its class and whether it was the recovered token."""
    if not proposal.candidates:
        return []
    rejected = outcome.accepted < proposal.lengths[i]
    recovered = outcome.tokens[outcome.accepted] if rejected else None
    return [
        (kind, place == outcome.accepted and token == recovered)
        for token, place, kind in proposal.candidates[i]
        if place <= outcome.accepted
    ]
