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
from contextlib import ExitStack, suppress
from dataclasses import replace

from outrider.decode.one_round import OneRound, by_drafter
from outrider.decode.row import Request, Row, check_constraints, check_request
from outrider.decode.together import step_together
from outrider.draft_length import DraftLength, FixedLength
from outrider.drafters.base import DraftContext, Drafter, bind_alone, check_alternatives
from outrider.drafters.ready import begin_rest, parts_of, state_with, worth_while
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel, open_sequence
from outrider.models.cache.slots import opening_several
from outrider.prefill import keep, prefill
from outrider.randomness import keys_of
from outrider.records import Round
from outrider.round import Extras, Scorer
from outrider.sampling import SamplingSettings
from outrider.settings.drafting import check_lenience
from outrider.support.alone import Alone
from outrider.support.checks import check_count
from outrider.support.clock import PhaseClock


class Decoder:
    """One batch being generated: iterate over `rounds()`; `rows` can be read at any time.

    Without requests it is a batch that others fill: `admit` and `step` in turn, `dismiss` for rows that are done with, and
    `close` at the end. Several threads may each have one over the same engines: their rounds take turns (`alone`).

    lenience: below 1 more is accepted than the target's law allows: lossy (`lenience`).
    alternatives: to be scored beside each drafted token (`proposal.Alternatives`), None: those that `length` wants.
    clock: that of others whose rounds are made together with these (`step_together`). failing_alone: a row that has no law
    ends (`Row.error`, without a record), and the others go on.
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
        clock: PhaseClock | None = None,
        failing_alone: bool = False,
    ) -> None:
        check_lenience(lenience)
        if drafter is not None and length is None:
            raise ParameterError("length must say how much a drafter drafts, FixedLength(4) say, got None")
        if extras is not None:
            check_count("top_logprobs", extras.top_logprobs, 0, target.vocab_size)
        for request in requests:
            check_request(request, target)
        check_constraints(sampling, target)
        if drafter is not None:
            bind_alone(drafter, target)
        self.engines = [target, *(drafter.engines() if drafter is not None else ())]
        self.alone = Alone(self.engines)
        self._wanted = None if length is None else drafter
        self._chosen: dict[tuple[int, ...], Drafter | None] = {}  # what of it was made ready for some rows, by its parts
        self.target = target
        self.rows: list[Row] = []
        self._requests = requests
        self._admitted = 0
        self._length = length if drafter is not None and length is not None else FixedLength(0)
        self._company = 0  # rows that shared the last round
        self._ask = cancelled
        self._was_cancelled = False
        self._failed, self._failing_alone = False, failing_alone
        self.clock = clock or PhaseClock(target.device)
        self._scorer = Scorer(target, sampling, self.clock, extras or Extras(), lenience=lenience)
        self._beside = self.alone.run(check_alternatives, alternatives, target, drafter)
        self._context = DraftContext(sampling, target, target.vocab_size, self.clock, self._beside)

    def rounds(self) -> Iterator[list[tuple[int, Round]]]:
        """The rounds of all unfinished rows, a list of (row, round) per pass. Frees all sequences when it ends."""
        with self.alone.ending(self._close_all):
            if not self._requests:
                raise ParameterError("requests must not be empty: give at least one prompt")
            self.admit(self._requests)
            while not self._cancelled() and (made := self.step()):
                yield made
            for row in self.rows:
                row.finish_reason = row.finish_reason or "cancelled"

    def admit(self, requests: Many[Request], read: bool = True) -> list[Row]:
        """Let further sequences join, their prompts read together. → their rows, numbered on from those before

        Either all of a batch are decided by position or none (`RandomStream.key`). read: now; if not, they take part in
        rounds once `read_together` has done so.
        """
        for request in requests:
            self.check(request)
        going = [row.request for row in self.rows if row.finish_reason is None]
        self._context = self._context_for([*going, *requests])
        self.begin()
        before = len(self.rows)
        try:
            joined = self.alone.run(self._admit, requests, read)
        except Exception:
            if len(self.rows) == before:  # nothing has joined, and all is as it was
                self.done()
            raise
        self.done()
        return joined

    def _admit(self, requests: Many[Request], read: bool) -> list[Row]:
        with opening_several():
            return self._join(requests, read)

    def _join(self, requests: Many[Request], read: bool) -> list[Row]:
        context, joined = self.target.max_length, []
        self.clock.take()
        with self.clock.phase("prefill"):
            for request in requests:
                length = self._length.start()  # first: it may be of the user's making, and raise
                sequence = open_sequence(self.target, request.source, len(request.prompt) + request.max_new_tokens)
                joined.append(Row(self._admitted, request, sequence, length, context))
                self._admitted += 1
                self.rows.append(joined[-1])  # at once, so that `close` knows of it whatever happens next
            if read:
                prefill(self.target, [row.sequence for row in joined], [row.unread for row in joined], self._cancelled)
        if read and joined and not self._cancelled():
            self.let_go(joined, len(self.active) + len(joined))
        seconds = self.clock.take()["prefill"]
        for row in joined:
            row.prefill_seconds = seconds / len(joined)
        return joined

    def let_go(self, rows: list[Row], company: int) -> None:
        """Their prompts have been read: drafts begin that are worth it, and they take part in rounds.

        company: how many rows share the passes with them, or will, they and those of other decoders included.
        """
        self._length.shared_by(company)
        drafter = self._worth_while()
        if drafter is not None and rows:
            for row in rows:
                row.drafter = drafter
            drafter.begin([row.draft for row in rows], self._context)
        for row in rows:
            row.reading = False

    def _worth_while(self, ready: Drafter | None = None) -> Drafter | None:
        """What is worth making ready now, of a row that has something ready as well: the same object for all such rows."""
        if self._wanted is None:
            return None
        found = worth_while(self._wanted, self._length, self._scorer.sampling, ready)
        return self._chosen.setdefault(tuple(map(id, parts_of(found))), found)

    def take_back(self, row: Row) -> None:
        """Of a row for which drafts did not begin: what they have made of it."""
        with suppress(Exception):  # the first error is told
            if row.drafter is not None:
                row.drafter.end(row.draft)
        row.draft.state = None

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
        if request.source is not None and self._wanted is not None:  # all of it may be made ready one day
            self._wanted.check_source(request.source)

    def step(self) -> list[tuple[int, Round]]:
        """One round of all unfinished rows; empty if there are none.

        After a round that raised, rows and sequences may disagree, so that no other can be made: `ParameterError`.
        """
        self.check_order()
        (made,) = step_together([self])
        if isinstance(made, Exception):
            raise made
        return made

    def part_of_round(self, company: int) -> OneRound:
        """Draft for the unfinished rows. company: as in `let_go`."""
        active = self.active
        if company != self._company:
            self._share(active, company)
        return OneRound(active, self._context, self._scorer, self._failing_alone)

    def begin(self) -> None:
        """Something is done that leaves rows and sequences in order only if it comes to its end: `done`."""
        self.check_order()
        self._failed = True

    def check_order(self) -> None:
        """Raise `ParameterError` after a round that raised."""
        if self._failed:
            raise ParameterError("an earlier round has failed, and left nothing to go on from: begin with another Decoder")

    def done(self) -> None:
        """All is in order."""
        self._failed = False

    @property
    def active(self) -> list[Row]:
        """The rows that take part in rounds."""
        return [row for row in self.rows if row.finish_reason is None and not row.reading]

    @property
    def reading(self) -> list[Row]:
        """The rows whose prompts have not been read."""
        return [row for row in self.rows if row.finish_reason is None and row.reading]

    def end(self, row: Row) -> None:
        """Let a row end before its time."""
        in_order = row.finish_reason is None and not self._failed
        row.finish_reason = row.finish_reason or "cancelled"
        self.alone.finish(lambda: self.retire(row) if in_order else self.close_row(row))

    def close_failed(self) -> None:
        """Free the sequences of rows that failed outside of a round."""
        for row in self.rows:
            if row.error is not None:
                with suppress(Exception):  # its drafter's, which may have raised the first one
                    self.close_row(row)

    def dismiss(self) -> None:
        """Forget the rows that have ended, so that a batch that never ends does not grow."""
        self.rows = [row for row in self.rows if row.finish_reason is None]

    def close(self) -> None:
        """Free all sequences."""
        self.alone.finish(self._close_all)

    def _close_all(self) -> None:
        with ExitStack() as stack:  # every row is closed, whatever one of them raises
            for row in self.rows:
                stack.callback(self.close_row, row)

    def _cancelled(self) -> bool:
        """Whether to stop; once said, it holds, so that nothing goes on from a prompt half read."""
        self._was_cancelled = self._was_cancelled or self._ask()
        return self._was_cancelled

    def _share(self, active: list[Row], company: int) -> None:
        """Let the policy know how many rows share the passes, and drafts begin that are worth it for so few of them."""
        self._company = company
        if not self._length.shared_by(company):
            return
        for before, at in by_drafter(active):
            further = self._worth_while(before)
            if further is None or further is before:
                continue
            rows = [active[i] for i in at]
            for row in rows:
                row.drafter, row.draft.state = further, state_with(further, before, row.draft)
            begin_rest(further, before, [row.draft for row in rows], replace(self._context, late=True))

    def retire(self, row: Row) -> None:
        """Close a row whose sequence and tokens are in order: others may go on from what it has read and written."""
        try:
            if row.error is None and not row.ended and row.request.source is None:
                keep(self.target, row.sequence, row.tokens)
        finally:
            self.close_row(row)

    def close_row(self, row: Row) -> None:
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
