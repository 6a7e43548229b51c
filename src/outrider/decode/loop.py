"""Speculative decoding over a ragged batch (Chen Algorithm 2, Leviathan Algorithm 1). Plain decoding is draft length 0.

Each round every unfinished row drafts as many tokens as its policy wants, the target scores all rows in one pass, and the
acceptance rule says what each row keeps. The newest token of a row is always unscored: it goes in front of the next draft,
so that one pass yields the laws for the draft *and* for the token after it.

Rows may join between rounds (`admit`), so that a finished row's place is taken at once: continuous batching. What a row
writes has the same law whatever rows keep it company; where the draft length does not learn from other rows
(`DraftLength.together`), the same seed also gives it the same tokens.

The loop knows token ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from outrider.decode.row import Request, Row, check_constraints, check_request
from outrider.draft_length import DraftLength, FixedLength, Trial
from outrider.draft_length.base import Prospect
from outrider.drafters.base import DraftContext, Drafter, bind_alone, check_alternatives
from outrider.drafters.checked import proposal_from, prospects_of
from outrider.drafters.ready import begin_rest, state_with, worth_while
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel, open_sequence
from outrider.models.cache.slots import opening_several
from outrider.prefill import prefill
from outrider.proposal import Proposal, empty_proposal
from outrider.randomness import keys_of
from outrider.records import PHASES, Round
from outrider.round import Extras, Outcome, Scorer, verify_round
from outrider.sampling import SamplingSettings
from outrider.settings.drafting import check_lenience
from outrider.support.alone import Alone
from outrider.support.clock import PhaseClock

About = TypeVar("About")
Done = TypeVar("Done")


class Decoder:
    """One batch being generated: iterate over `rounds()`; `rows` can be read at any time.

    Without requests it is a batch that others fill: `admit` and `step` in turn, `dismiss` for rows that are done with, and
    `close` at the end. Several threads may each have one over the same engines: their rounds take turns (`alone`).

    lenience: below 1 more is accepted than the target's law allows: lossy (`lenience`).
    alternatives: to be scored beside each drafted token (`proposal.Alternatives`), None: those that `length` wants.
    """

    def __init__(
        self,
        target: LanguageModel,
        requests: Many[Request],
        sampling: SamplingSettings,
        drafter: Drafter | None = None,
        length: DraftLength | None = None,
        extras: Extras | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        lenience: float = 1.0,
        alternatives: int | None = None,
    ) -> None:
        check_lenience(lenience)
        for request in requests:
            check_request(request, target)
        check_constraints(sampling, target)
        if drafter is not None:
            bind_alone(drafter, target)
        self._alone = Alone([target, *(drafter.engines() if drafter is not None else ())])
        self._wanted = drafter if length is not None else None
        self.target = target
        self.drafter = drafter if length is None or drafter is None else worth_while(drafter, length, sampling)
        self.rows: list[Row] = []
        self._requests = requests
        self._admitted = 0
        self._length = length if drafter is not None and length is not None else FixedLength(0)
        self._sharing = 0  # rows, in the last round
        self._ask = cancelled
        self._was_cancelled = False
        self._failed = False
        self._clock = PhaseClock(target.device)
        self._scorer = Scorer(target, sampling, self._clock, extras or Extras(), lenience=lenience)
        self._beside = self._alone.run(check_alternatives, alternatives, target, drafter)
        self._context = DraftContext(sampling, target, target.vocab_size, self._clock, self._beside)

    def rounds(self) -> Iterator[list[tuple[int, Round]]]:
        """The rounds of all unfinished rows, a list of (row, round) per pass. Frees all sequences when it ends."""
        with self._alone.ending(self._close_all):
            if not self._requests:
                raise ParameterError("requests must not be empty: give at least one prompt")
            self.admit(self._requests)
            while not self._cancelled() and (made := self.step()):
                yield made
            for row in self.rows:
                row.finish_reason = row.finish_reason or "cancelled"

    def admit(self, requests: Many[Request]) -> list[Row]:
        """Let further sequences join, their prompts read together. → their rows, numbered on from those before

        Either all of a batch are decided by position or none (`RandomStream.key`).
        """
        for request in requests:
            self.check(request)
        self._context = self._context_for([*(row.request for row in self.rows if row.finish_reason is None), *requests])
        return self._unless_failed(self._admit, requests)

    def _admit(self, requests: Many[Request]) -> list[Row]:
        with opening_several():
            return self._join(requests)

    def _join(self, requests: Many[Request]) -> list[Row]:
        context, joined = self.target.max_length, []
        self._clock.take()
        with self._clock.phase("prefill"):
            for request in requests:
                sequence = open_sequence(self.target, request.source, len(request.prompt) + request.max_new_tokens)
                joined.append(Row(self._admitted, request, sequence, self._length.start(), context))
                self._admitted += 1
                self.rows.append(joined[-1])  # at once, so that `close` knows of it whatever happens next
            prefill(self.target, [row.sequence for row in joined], [row.tokens[:-1] for row in joined], self._cancelled)
        if self.drafter is not None and joined and not self._cancelled():
            for row in joined:
                row.drafter = self.drafter
            self.drafter.begin([row.draft for row in joined], self._context)
        seconds = self._clock.take()["prefill"]
        for row in joined:
            row.prefill_seconds = seconds / len(joined)
        return joined

    def _context_for(self, requests: Many[Request]) -> DraftContext:
        """What drafters are told. Without alternatives where tokens are drawn by position: their sums are added up in
        another order, and a token could differ by rounding, and by whether there was a draft.
        """
        by_position = keys_of([request.stream for request in requests]) is not None
        if by_position and self._scorer.lenience < 1.0:
            raise ParameterError(f"lenience must be 1 where tokens are drawn by position, got {self._scorer.lenience:g}")
        if not by_position or self._scorer.sampling.greedy:
            return replace(self._context, alternatives=self._beside)
        if self._beside:
            raise ParameterError(f"alternatives must be 0 where tokens are drawn by position, got {self._beside}")
        return replace(self._context, alternatives=0)

    def check(self, request: Request) -> None:
        """Raise unless the request can be served."""
        check_request(request, self.target)
        drafter = self._wanted or self.drafter  # all of it may be made ready one day
        if request.source is not None and drafter is not None:
            drafter.check_source(request.source)

    def step(self) -> list[tuple[int, Round]]:
        """One round of all unfinished rows; empty if there are none.

        After a round that raised, rows and sequences may disagree, so that no other can be made: `ParameterError`.
        """
        active = [row for row in self.rows if row.finish_reason is None]
        return self._unless_failed(self._round, active) if active else []

    def _unless_failed(self, work: Callable[[About], Done], about: About) -> Done:
        """Do what leaves rows and sequences in order, unless it raises."""
        if self._failed:
            raise ParameterError("an earlier round has failed, and left nothing to go on from: begin with another Decoder")
        self._failed = True
        done = self._alone.run(work, about)
        self._failed = False
        return done

    def dismiss(self) -> None:
        """Forget the rows that have ended, so that a batch that never ends does not grow."""
        self.rows = [row for row in self.rows if row.finish_reason is None]

    def close(self) -> None:
        """Free all sequences."""
        self._alone.finish(self._close_all)

    def _close_all(self) -> None:
        with ExitStack() as stack:  # every row is closed, whatever one of them raises
            for row in self.rows:
                stack.callback(self._close, row)

    def _cancelled(self) -> bool:
        """Whether to stop; once said, it holds, so that nothing goes on from a prompt half read."""
        self._was_cancelled = self._was_cancelled or self._ask()
        return self._was_cancelled

    def _round(self, active: list[Row]) -> list[tuple[int, Round]]:
        self._clock.take()  # what the caller did since the last round is not ours
        if len(active) != self._sharing:
            self._share(active)
        prospects, proposal = self._propose(active)
        outcomes = verify_round(self._scorer, [row.draft for row in active], proposal)
        kept = [row.extend(outcome.tokens) for row, outcome in zip(active, outcomes, strict=True)]
        for row, outcome, count in zip(active, outcomes, kept, strict=True):
            row.draft.drawn = 2 if outcome.taken and count == len(outcome.tokens) else 1
            # Scored: the old newest token and the draft. Still true of the row: all but its new newest token.
            row.sequence.truncate(min(row.sequence.length, len(row.tokens) - 1))
        if self.drafter is not None:
            self.drafter.observe([row.draft for row in active])
        seconds = {phase: value / len(active) for phase, value in self._clock.take().items()}
        records = []
        for i, (row, outcome) in enumerate(zip(active, outcomes, strict=True)):
            prospect = prospects[i] if proposal.lengths[i] else None
            record = _record(row, outcome, kept[i], prospect, seconds, proposal, i, self._scorer.lenience)
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
            if row.finish_reason is not None:
                self._close(row)
            records.append((row.number, record))
        return records

    def _share(self, active: list[Row]) -> None:
        """Let the policy know how many rows share the passes, and drafts begin that are worth it for so few of them."""
        self._sharing = len(active)
        if not self._length.shared_by(len(active)) or self._wanted is None:
            return
        before = self.drafter
        further = worth_while(self._wanted, self._length, self._scorer.sampling, before)
        if further is None or further is before:
            return
        self.drafter, rows = further, [row.draft for row in active]
        for row in active:
            row.drafter, row.draft.state = further, state_with(further, before, row.draft)
        begin_rest(further, before, rows, replace(self._context, late=True))

    def _propose(self, active: list[Row]) -> tuple[list[Prospect | None], Proposal]:
        """What each row's policy wants, drafted. → the prospects chosen, the proposal"""
        if self.drafter is None:
            return [None] * len(active), empty_proposal(len(active), self.target.device)
        prospects = [prospects_of(self.drafter, row.draft) for row in active]
        plans = [row.plan(offered) for row, offered in zip(active, prospects, strict=True)]
        for row, offered, plan in zip(active, prospects, plans, strict=True):
            row.follow(self.drafter, offered, plan)
        chosen: list[Prospect | None] = [offered[plan.prospect] for offered, plan in zip(prospects, plans, strict=True)]
        if not any(plan.limit for plan in plans):
            return chosen, empty_proposal(len(active), self.target.device)
        return chosen, proposal_from(self.drafter, [row.draft for row in active], plans, self._context)

    def _close(self, row: Row) -> None:
        """May be called again, as far as an interrupt had let it come."""
        try:
            if row.drafter is not None and not row.ended:
                try:
                    row.drafter.end(row.draft)
                except Exception:  # an interrupt is none: it is asked again
                    row.ended = True
                    raise
                row.ended = True
        finally:
            row.sequence.close()


def _record(
    row: Row,
    outcome: Outcome,
    kept: int,
    prospect: Prospect | None,
    seconds: dict[str, float],
    proposal: Proposal,
    i: int,
    lenience: float,
) -> Round:
    return Round(
        tokens=tuple(outcome.tokens[:kept]),
        drafted=proposal.lengths[i],
        accepted=outcome.accepted,
        drafter=prospect.drafter if prospect is not None else None,
        seconds={phase: seconds[phase] for phase in PHASES},
        logprobs=None if outcome.logprobs is None else tuple(outcome.logprobs[:kept]),
        betas=None if outcome.betas is None else tuple(outcome.betas),
        drafts=None if outcome.drafts is None else tuple(outcome.drafts),
        signals=tuple(proposal.signals[i]) if proposal.signals and proposal.signals[i] else None,
        finish_reason=row.finish_reason,
        lenience=lenience,
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


def decode(
    target: LanguageModel,
    requests: Many[Request],
    sampling: SamplingSettings,
    drafter: Drafter | None = None,
    length: DraftLength | None = None,
    extras: Extras | None = None,
    lenience: float = 1.0,
    alternatives: int | None = None,
) -> tuple[list[list[int]], list[list[Round]]]:
    """Run a batch to its end. → each row's new tokens, each row's rounds"""
    decoder = Decoder(target, requests, sampling, drafter, length, extras, lenience=lenience, alternatives=alternatives)
    rounds: list[list[Round]] = [[] for _ in requests]
    for batch in decoder.rounds():
        for number, record in batch:
            rounds[number].append(record)
    return [[token for record in row for token in record.tokens] for row in rounds], rounds
