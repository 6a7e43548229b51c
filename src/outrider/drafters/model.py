"""A smaller model as the drafter: autoregressive, its tokens drawn from its own standardised distribution."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import Tensor

from outrider.costs import Costs, DraftSeconds, measured_costs
from outrider.costs.table import REMEMBERED, STEP
from outrider.draft_length.base import Plan, Prospect
from outrider.draft_steps.own_tokens import OwnTokens
from outrider.draft_steps.steps import Steps
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.drafting import draft_in_steps, read_by, room_after
from outrider.models.base import LanguageModel, Sequence, Source, has_encoder, known_tokens, open_sequence
from outrider.models.compatibility import check_same_tokens, share_source
from outrider.prefill import prefill
from outrider.proposal import DraftRow, Proposal
from outrider.sampling import SamplingSettings
from outrider.support.device_data import pad_rows

MANY = 32  # tokens, from which on they are read as prompts are
USUAL = 5  # tokens that a round leaves to be read, at most, where the one before has drafted, too
COARSE = 8  # tokens more than these are told in steps


def seconds_after(costs: Costs | None, pending: int, held: int) -> tuple[float, float, float]:
    """Of a drafted token, and before the first, where so many of the tokens held are yet to be read; and of reading those
    beyond what is usual.
    """
    if costs is None:
        return 0.0, 0.0, 0.0
    step, usual = costs.about(1, held) - costs.warm, costs.about(min(pending, USUAL), held)
    behind = costs.about(pending, held) - usual if pending > USUAL else 0.0
    return step, max(0.0, usual - step), max(0.0, behind)


def draft_seconds(costs: Costs | None) -> DraftSeconds:
    """Of drafts that follow each other closely."""
    return DraftSeconds() if costs is None else DraftSeconds(costs.verify(1) - costs.warm, costs.warm)


def catch_up(model: LanguageModel, sequences: Many[Sequence], texts: Many[list[int]]) -> None:
    """Read texts but for their newest tokens, as prompts are read, where much of them is yet to be."""
    far = [(one, text) for one, text in zip(sequences, texts, strict=True) if len(text) - one.length > MANY]
    if far:
        prefill(model, [one for one, _ in far], [known_tokens(text[:-1], model.vocab_size) for _, text in far])


class ModelDrafter(Drafter):
    """Drafts with a `LanguageModel` that speaks the target's tokens.

    sampling: the draft's own settings, if it should sample otherwise than the target (Leviathan 5): exact all the same.
    step_seconds: what a drafted token costs, if it need not be measured.

    A row's state is its sequence in the draft model. It holds a prefix of the row's tokens and may lag behind by any
    number of them: after a fully accepted draft by two (the last drafted token, never scored here, and the bonus token).
    For an encoder-decoder target, a draft that is one, too, reads the source with its own encoder, and a decoder-only draft
    reads source and tokens as one text.
    """

    names_others = True
    _measures = True
    _offers_by: tuple[LanguageModel, Costs | None] | None = None
    _offers: dict[tuple[int, int, int], Prospect]  # by tokens yet to be read, tokens held, and room: asked for in each round
    first, later, tests = Prospect.first, Prospect.later, Prospect.tests  # acceptance to assume at first

    def __init__(
        self, model: LanguageModel, sampling: SamplingSettings | None = None, step_seconds: float | None = None
    ) -> None:
        self.model = model
        self.name = model.name
        self.sampling = sampling
        self._costs = Costs({1: step_seconds}) if step_seconds is not None else None
        self._measures = step_seconds is None

    def bind(self, target: LanguageModel) -> None:
        check_same_tokens(target, self.model)
        share_source(target, self.model)

    def check_source(self, source: Source) -> None:
        if has_encoder(self.model):
            self.model.check_source(source)

    def _read(self, row: DraftRow) -> list[int]:
        return read_by(self.model, row)

    def measure(self) -> None:
        if self._measures:  # each time: of other rows side by side they are others
            self._costs = measured_costs(self.model)

    @property
    def seconds(self) -> DraftSeconds:
        return draft_seconds(self._costs)

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        limit = self.model.max_length
        fitting = []
        for row in rows:
            row.state = open_sequence(self.model, row.source)
            if limit is None or len(self._read(row)) <= limit:
                fitting.append(row)
        if context.late:
            return
        with context.clock.phase("prefill"):
            prompts = [known_tokens(self._read(row)[:-1], self.model.vocab_size) for row in fitting]
            prefill(self.model, [row.state for row in fitting], prompts)

    def prospects(self, row: DraftRow) -> list[Prospect]:
        if (self.model, self._costs) != self._offers_by:
            self._offers, self._offers_by = {}, (self.model, self._costs)
        held, room = len(self._read(row)), self._room(row)
        pending = held - row.state.length
        if pending > USUAL:
            pending = -(-pending // COARSE) * COARSE
        asked = (pending, held // STEP, room)
        offered = self._offers.get(asked)
        if offered is None:
            if len(self._offers) >= REMEMBERED:
                self._offers.clear()
            offered = self._offers[asked] = self._prospect(pending, held, room)
        return [offered]

    def _prospect(self, pending: int, held: int, room: int) -> Prospect:
        step, start, behind = self._seconds(pending, held)
        return Prospect(
            self.name,
            first=self.first,
            later=self.later,
            tests=self.tests,
            step_seconds=step,
            start_seconds=start,
            behind_seconds=behind,
            longest=room,
            gated=self.model.device.type == "cpu",  # elsewhere the signals would cost a synchronisation each
        )

    def _seconds(self, pending: int, held: int) -> tuple[float, float, float]:
        return seconds_after(self._costs, pending, held)

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        limits = [min(plan.limit, self._room(row)) for row, plan in zip(rows, plans, strict=True)]
        sampling = self.sampling or context.sampling
        own = OwnTokens.of(self.model, context.vocab_size, sampling)

        def advance(active: list[int], steps: Steps | None) -> Tensor:
            return self._advance(own, [rows[i] for i in active], None if steps is None else steps.newest(active))

        return draft_in_steps(own, rows, plans, limits, sampling, context, advance)

    def _room(self, row: DraftRow) -> int:
        return room_after(self.model, len(self._read(row)))

    def _advance(self, own: OwnTokens, rows: list[DraftRow], newest: Tensor | None) -> Tensor:
        """Score what the draft model has not seen, or the tokens just drafted, [A, 1]. → logits [A, T]"""
        if newest is not None:
            return own.score([row.state for row in rows], newest, [1] * len(rows))
        texts = [self._read(row) for row in rows]
        catch_up(self.model, [row.state for row in rows], texts)
        new = [text[row.state.length :] for row, text in zip(rows, texts, strict=True)]
        pending = [known_tokens(tokens, self.model.vocab_size) for tokens in new]
        return own.score([row.state for row in rows], *pad_rows(pending, self.model.device))

    def observe(self, rows: Many[DraftRow]) -> None:
        """Roll back to what the row's tokens still hold: everything before the recovered or bonus token, at most."""
        for row in rows:
            row.state.truncate(min(row.state.length, len(self._read(row)) - row.drawn))

    def reader(self) -> LanguageModel:
        """The model that gives the draft's laws along a known text (`forced`)."""
        return self.model

    def end(self, row: DraftRow) -> None:
        if row.state is not None:
            row.state.close()
