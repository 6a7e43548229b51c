"""A draft model that is itself accelerated (Leviathan 5): a speculative decoder as the drafter, to any depth.

Its own drafter proposes, the draft model verifies. Each token it hands on follows the draft model's law exactly, given the
tokens before it and whatever was decided before it, and that law is known: it is what the outer acceptance tests against.
A round inside may end anywhere; whether a further position is drafted depends on what came before it only.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.costs import Costs, DraftSeconds, measured_costs
from outrider.draft_length import AdaptiveLength, DraftLength, LengthState, Trial
from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.checked import proposal_from, prospects_of
from outrider.drafters.drafting import read_by, room_after
from outrider.drafters.model import catch_up, seconds_after
from outrider.models.base import LanguageModel, Source, has_encoder, known_tokens, open_sequence
from outrider.models.compatibility import check_same_tokens, share_source
from outrider.prefill import prefill
from outrider.proposal import DraftRow, Proposal, empty_proposal, padded_proposal
from outrider.round import Extras, Outcome, Scorer, verify_round
from outrider.sampling import SamplingSettings


@dataclass
class _Inner:
    """A row inside: its own view of the tokens (what is drafted included) and its own draft-length policy."""

    row: DraftRow
    length: LengthState


class SpeculativeDrafter(Drafter):
    """Drafts with `model`, accelerated by `drafter`. length: the inner policy, adaptive by default."""

    def __init__(
        self,
        model: LanguageModel,
        drafter: Drafter,
        length: DraftLength | None = None,
        sampling: SamplingSettings | None = None,
        step_seconds: float | None = None,
    ) -> None:
        self.model = model
        self.drafter = drafter
        self.name = f"{model.name} < {drafter.name}"
        self.remembers = drafter.remembers
        self._length = length
        self._sampling = sampling
        self._given, self._seconds = step_seconds, step_seconds
        self._adaptive: AdaptiveLength | None = None
        self._costs: Costs | None = None

    def bind(self, target: LanguageModel) -> None:
        check_same_tokens(target, self.model)
        share_source(target, self.model)
        self.drafter.bind(self.model)

    def occasion(self) -> Many[int]:
        return self.drafter.occasion()

    def engines(self) -> list[LanguageModel]:
        return [self.model, *self.drafter.engines()]

    def check_source(self, source: Source) -> None:
        if has_encoder(self.model):
            self.model.check_source(source)
            self.drafter.check_source(source)

    def _read(self, row: DraftRow) -> list[int]:
        return read_by(self.model, row)

    def measure(self) -> None:
        costs = measured_costs(self.model)
        self.drafter.measure()
        self._adaptive = AdaptiveLength(costs)
        if self._given is None:
            self._costs = costs
            self._seconds = costs.verify(1)  # without its own draft: an upper bound, whatever that gains

    @property
    def seconds(self) -> DraftSeconds:
        return DraftSeconds(self._seconds or 0.0)

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        length = self._length or self._adaptive or AdaptiveLength(measured_costs(self.model))
        for row in rows:
            sequence = open_sequence(self.model, row.source)
            tokens = list(self._read(row))
            # Source and tokens are one prompt to a decoder-only draft, and whoever drafts for it.
            source = row.source if has_encoder(self.model) else None
            before = len(tokens) - len(row.tokens)
            inner = DraftRow(
                tokens,
                row.prompt_length + before,
                row.stream,
                sequence,
                source=source,
                ends=row.ends,
                shift=row.shift + before,
            )
            row.state = _Inner(inner, length.start())
        inners = [row.state.row for row in rows]
        fitting = [inner for inner in inners if self._room(inner) > 0]
        if context.late:
            fitting = []  # read with the first draft
        with context.clock.phase("prefill"):
            prompts = [known_tokens(inner.tokens[:-1], self.model.vocab_size) for inner in fitting]
            prefill(self.model, [inner.sequence for inner in fitting], prompts)
        self.drafter.begin(inners, self._inside(context))

    def _inside(self, context: DraftContext) -> DraftContext:
        sampling = self._sampling or context.sampling
        return DraftContext(sampling, self.model, context.vocab_size, context.clock, late=context.late)

    def _room(self, row: DraftRow) -> int:
        return room_after(self.model, len(row.tokens))

    def prospects(self, row: DraftRow) -> list[Prospect]:
        inner: DraftRow = row.state.row
        held = len(self._read(row))
        _, _, behind = seconds_after(self._costs, held - inner.sequence.length, held)
        return [Prospect(self.name, step_seconds=self.seconds.token, behind_seconds=behind, longest=self._room(inner))]

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        inners: list[_Inner] = [row.state for row in rows]
        for row, inner in zip(rows, inners, strict=True):
            inner.row.tokens[:] = self._read(row)
            inner.row.uncertain, inner.row.drawn = row.uncertain, 1  # of its own rounds, from here on
        limits = [min(plan.limit, self._room(inner.row)) for plan, inner in zip(plans, inners, strict=True)]
        drafting = [inner.row for inner, limit in zip(inners, limits, strict=True) if limit > 0]
        with context.clock.phase("draft"):
            catch_up(self.model, [inner.sequence for inner in drafting], [inner.tokens for inner in drafting])
        drafted: list[list[int]] = [[] for _ in rows]
        laws: list[list[Tensor]] = [[] for _ in rows]
        inside = self._inside(context)
        wanted = Extras(laws=True)
        scorer = Scorer(self.model, inside.sampling, context.clock, wanted, context.vocab_size, phase="draft")
        while active := [i for i in range(len(rows)) if len(drafted[i]) < limits[i]]:
            room = [limits[i] - len(drafted[i]) - 1 for i in active]
            outcomes = self._round(scorer, inside, [inners[i] for i in active], room)
            for i, outcome in zip(active, outcomes, strict=True):
                new = [token for token in outcome.tokens if token >= 0]
                drafted[i] += new
                if outcome.laws is not None:
                    laws[i].append(outcome.laws[: len(new)])
                if len(new) < len(outcome.tokens):
                    limits[i] = len(drafted[i])  # no law for the next token: the draft ends here
        return padded_proposal(drafted, context.device, laws)

    def _round(self, scorer: Scorer, inside: DraftContext, inners: list[_Inner], room: list[int]) -> list[Outcome]:
        """One round of the draft model and its drafter."""
        rows = [inner.row for inner in inners]
        prospects = [
            [replace(p, deterministic=False) for p in prospects_of(self.drafter, row)] for row in rows
        ]  # nothing is certain
        plans = [inner.length.plan(p, n, len(inner.row.tokens)) for inner, p, n in zip(inners, prospects, room, strict=True)]
        proposal = (
            proposal_from(self.drafter, rows, plans, inside)
            if any(plan.limit for plan in plans)
            else empty_proposal(len(rows), self.model.device)
        )
        outcomes = verify_round(scorer, rows, proposal)
        for i, (inner, outcome) in enumerate(zip(inners, outcomes, strict=True)):
            tokens = [token for token in outcome.tokens if token >= 0]
            inner.row.tokens += tokens
            inner.row.uncertain += len(tokens)
            inner.row.sequence.truncate(min(inner.row.sequence.length, len(inner.row.tokens) - 1))
            offered = proposal.lengths[i]
            tested = Trial(
                prospects[i][plans[i].prospect] if offered else None,
                offered,
                min(outcome.accepted + 1, offered),
                outcome.accepted,
                proposal.signals[i] if proposal.signals else (),
            )
            inner.length.update(tested)
        self.drafter.observe(rows)
        return outcomes

    def observe(self, rows: Many[DraftRow]) -> None:
        """Go back to what the outer round kept, at every depth."""
        for row in rows:
            inner = row.state.row
            inner.tokens[:] = self._read(row)
            inner.uncertain, inner.drawn = row.uncertain, row.drawn
            inner.sequence.truncate(min(inner.sequence.length, len(inner.tokens) - inner.drawn))
        self.drafter.observe([row.state.row for row in rows])

    def end(self, row: DraftRow) -> None:
        if row.state is None:
            return
        try:
            self.drafter.end(row.state.row)
        finally:
            row.state.row.sequence.close()
