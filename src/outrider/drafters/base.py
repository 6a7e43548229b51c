"""The contract between the decoding loop and whatever proposes tokens.

Before each round a drafter tells the draft-length policy its *prospects* for a row: in which ways it could draft now, how
such proposals fare, what a token costs. The policy answers with a *plan*: which prospect, and how many tokens at most. A
drafter that computes its tokens one by one asks the plan before each further one.

A drafter may stop early or propose nothing, but it must never withhold a token that it has drawn: whether a position is
offered must not depend on the token drawn for it, or the law is bent (`verify`). It may depend on all that came before.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from outrider.costs import DraftSeconds
from outrider.draft_length.base import Plan, Prospect
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel, Source, scores_alternatives
from outrider.proposal import DraftRow, Proposal
from outrider.sampling import SamplingSettings
from outrider.settings.drafting import check_count_of_alternatives
from outrider.support.alone import Alone
from outrider.support.clock import PhaseClock


@dataclass
class DraftContext:
    """What drafting depends on besides the rows. vocab_size: the width of the laws that proposals are tested against.

    alternatives: how many the target may be given beside each drafted token; None: those that the plan chooses. late: rows
    that begin are under way, and may end without a draft: what there is to read is read with the first one.
    """

    sampling: SamplingSettings
    target: LanguageModel
    vocab_size: int
    clock: PhaseClock = field(default_factory=PhaseClock)
    alternatives: int | None = 0
    late: bool = False

    @property
    def device(self) -> torch.device:
        return self.target.device


def bind_alone(drafter: Drafter, target: LanguageModel) -> None:
    """Bind while no other thread runs passes of the target, or of the drafter's engines: they may be prepared anew."""
    Alone([target, *drafter.engines()]).run(drafter.bind, target)


def check_alternatives(count: int | None, target: LanguageModel, drafter: Drafter | None) -> int | None:
    """How many alternatives a drafted token may have for this target: as wanted, none where it can't score any.

    Raises `ParameterError` for a number that is out of range, or that they can't serve.
    """
    if count is not None:
        check_count_of_alternatives(count)
    if drafter is None or not any(part.names_others for part in drafter.parts()):
        if count:
            who = "without a draft" if drafter is None else f"with {drafter.name}"
            raise ParameterError(
                f"alternatives must be 0 {who}, got {count}: they are what a model or head held likely beside its draft"
            )
        return 0
    possible = scores_alternatives(target)
    if count is None:
        return None if possible else 0
    if count and not possible:
        raise ParameterError(
            f"alternatives must be 0 for {target.name}, got {count}: decoder-only models of the transformers engine score "
            "them, but not in int8 or int4, with compiled passes or recurrent layers, or over several ranks"
        )
    return count


_OCCASIONS = itertools.count(1)


class Drafter(ABC):
    """Proposes tokens. One instance may serve several generations; state lives in the rows.

    Those of this package are copied for each (`apart`; not by transformers' `generate`). One of a user's own serves them
    itself: what `bind` and `measure` find must hold for all of them, or they take turns.
    """

    name: str
    remembers: bool = False
    """Whether it, or one inside it, keeps texts of earlier generations."""
    names_others: bool = False
    """Whether it can name alternatives to what it drafts (`proposal.Alternatives`)."""

    def bind(self, target: LanguageModel) -> None:
        """Called before a generation: raise if this drafter can't draft for `target`."""
        del target

    def check_source(self, source: Source) -> None:
        """Raise if its encoder, should it have one, can't read this source; called before a sequence is opened for it."""
        for part in self.parts():
            if part is not self:
                part.check_source(source)

    def occasion(self) -> Many[int]:
        """What tells this text from those that it knows, whole numbers of 0 or more; nothing of one that knows none.

        Taken once for each text and mixed into its random numbers, since the same seed may have made what is known: of one
        that remembers a number that no text before had, of a table of counts what tells it from other tables.
        """
        return (next(_OCCASIONS),) if self.remembers else ()

    def measure(self) -> None:
        """Measure what a token costs here (or look it up), for `prospects` to tell."""
        return

    def parts(self) -> list[Drafter]:
        """The drafters that the records can name."""
        return [self]

    def engines(self) -> list[LanguageModel]:
        """Those that it scores with, the target apart: no other thread runs passes of theirs while this one drafts.

        By default the `model` that it has, if it is one, and those of its parts.
        """
        own = getattr(self, "model", None)
        inner = [engine for part in self.parts() if part is not self for engine in part.engines()]
        return [own, *inner] if isinstance(own, LanguageModel) else inner

    @property
    def seconds(self) -> DraftSeconds:
        """What drafting takes, as far as it has been measured."""
        return DraftSeconds()

    def seconds_for(self, sampling: SamplingSettings) -> DraftSeconds:
        """The same of a text that is sampled so."""
        del sampling
        return self.seconds

    def part_seconds(self) -> dict[str, DraftSeconds]:
        """What drafting takes by each part, under the names that the records have for them."""
        return {part.name: part.seconds for part in self.parts()}

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        """Prepare the rows (their `state`) once their prompts are known."""
        del rows, context

    def prospects(self, row: DraftRow) -> list[Prospect]:
        """The ways in which it could draft for this row now, at least one; nothing may be drawn for it."""
        del row
        return [Prospect(self.name, step_seconds=self.seconds.token, start_seconds=self.seconds.start)]

    def preview(self, row: DraftRow, prospect: int, limit: int) -> Iterable[int]:
        """What `propose` would offer for a prospect that is `deterministic`: no draw, no pass, and nothing changed. It may
        be read later, when the row has gone on, and only so far as it turns out right.
        """
        del row, prospect, limit
        return []

    @abstractmethod
    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        """Draft up to plans[i].limit ≥ 0 tokens after row i."""

    def observe(self, rows: Many[DraftRow]) -> None:
        """Called after each round; `rows` hold the tokens that it gave, accepted ones of the proposal among them."""
        del rows

    def end(self, row: DraftRow) -> None:
        """The row is finished: free its state. Called once, for every row that `begin` was called for or was to be; again if
        that was interrupted.
        """
        del row
