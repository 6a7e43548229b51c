"""Beam search, plain and speculative (Leviathan A.4), over token ids.

Leviathan A.4: let the draft run the search some steps ahead, check all its hypotheses in one pass of the target, and accept
its steps as long as the target's own running hypotheses are among them. Here the target's search is *replayed*: each pass
yields continuations of every hypothesis that was asked about, and `state.advance` is applied as long as it has those that
it needs. A plain search asks about the running hypotheses alone, so it is the same computation with nothing drafted, and
the two differ in nothing but the number of passes, whatever the draft says. That holds to the bit if an engine's logits do
not depend on the shape of a pass; where they do, two hypotheses within that rounding may change places.

The paper hints at a "more elaborate procedure" that also accepts hypotheses which score higher than those that the target
alone would have kept. It is left out: its result is another one than beam search's (docs/beam-search.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack

from outrider.beam.draft import BeamDraft
from outrider.beam.length import BeamLength
from outrider.beam.records import BeamRound
from outrider.beam.rows import BeamRows
from outrider.beam.state import BeamState, Continuations, Path, Rules, advance
from outrider.beam.task import BeamTask
from outrider.errors import NumericalError, ParameterError
from outrider.models.base import LanguageModel, refuse_draft_only
from outrider.models.engine_checks import check_prompt
from outrider.settings.beams import BeamSettings
from outrider.support.alone import Alone
from outrider.support.checks import check_count
from outrider.support.clock import PhaseClock


class BeamDecoder:
    """One search: iterate over `rounds()`; `state`, `rules` and `prefill_seconds` can be read at any time.

    task: token ids, or a `BeamTask`. eos: tokens that end a text, kept as its last. draft: a model that speaks the target's
    tokens, None for plain beam search. length: how many steps to draft. draft_beams: hypotheses that the draft follows, by
    default num_beams. history: the hypotheses that ran before each step so far, if `keep_history` was set.
    """

    def __init__(
        self,
        target: LanguageModel,
        task: Many[int] | BeamTask,
        settings: BeamSettings,
        max_new_tokens: int,
        eos: frozenset[int] = frozenset(),
        draft: LanguageModel | None = None,
        length: BeamLength | None = None,
        draft_beams: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        keep_history: bool = False,
    ) -> None:
        refuse_draft_only(target)
        task = (task if isinstance(task, BeamTask) else BeamTask(list(task))).with_beams(settings.num_beams)
        limit = check_limits(target, task.prompt, max_new_tokens)
        width = settings.num_beams if draft_beams is None else draft_beams
        if width < settings.num_beams:
            raise ParameterError(f"draft_beams must be num_beams = {settings.num_beams} or more, got {width}")
        self.state = BeamState()
        self.prefill_seconds = 0.0
        self.cut_by_context = limit < max_new_tokens
        self.rules = Rules(settings, limit, eos, task.given)
        self._rows = BeamRows(target, task, target.vocab_size, limit)
        self._draft = None if draft is None else BeamDraft(draft, target, task, self.rules, width)
        self._length = length or BeamLength()
        self.history: list[tuple[Path, ...]] = []
        self._keep_history = keep_history
        self._known: dict[Path, Continuations] = {}
        self._cancelled = cancelled
        self._clock = PhaseClock(target.device)
        self._alone = Alone([target, *(() if draft is None else (draft,))])

    def rounds(self) -> Iterator[BeamRound]:
        """One record per pass of the target. Frees all sequences when it ends."""
        with self._alone.ending(self._close):
            self._alone.run(self._begin)
            self.prefill_seconds = self._clock.take()["prefill"]
            while not self.state.done and not self._cancelled():
                yield self._alone.run(self._round)

    def _begin(self) -> None:
        with self._clock.phase("prefill"):
            self._rows.begin()
            if self._draft is not None:
                self._draft.begin()

    def _close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._rows.close)
            if self._draft is not None:
                stack.callback(self._draft.close)

    def _round(self) -> BeamRound:
        self._clock.take()  # what the caller did since the last round is not ours
        with self._clock.phase("draft"):
            drafted = self._ahead()
        wanted = [one.tokens for one in self.state.running if one.tokens not in self._known]
        wanted += [path for level in drafted for path in level]
        with self._clock.phase("verify"):
            laws, work = self._rows.laws(wanted, self.rules.continuations_needed(self.rules.settings.num_beams))
        laws |= self._known
        if any(one.tokens not in laws for one in self.state.running):  # of the drafted ones, some may never be followed
            raise NumericalError("the model gave no distribution for a hypothesis: its logits are NaN; try dtype float32")
        steps = self._replay(laws)
        accepted = min(steps - 1, len(drafted))
        seconds = self._clock.take()
        self._length.update(len(drafted), min(accepted + 1, len(drafted)), accepted, seconds)
        return BeamRound(steps, len(drafted), accepted, len(wanted), work.rows, work.scored, work.again, seconds)

    def _ahead(self) -> list[list[Path]]:
        steps = min(self._length.plan(), self.rules.limit - self.state.steps - 1)
        return [] if self._draft is None or steps <= 0 else self._draft.ahead(self.state, self._known, steps)

    def _replay(self, laws: dict[Path, Continuations]) -> int:
        """The target's own search, as far as its laws are known. → steps taken"""
        steps = 0
        while not self.state.done and all(one.tokens in laws for one in self.state.running):
            if self._keep_history:
                self.history.append(tuple(one.tokens for one in self.state.running))
            self.state = advance(self.state, laws, self.rules)
            steps += 1
        running = [one.tokens for one in self.state.running]
        self._known = {path: laws[path] for path in running if path in laws}
        return steps


def check_limits(target: LanguageModel, prompt: Many[int], max_new_tokens: int) -> int:
    """Raise unless the search can be served. → the greatest number of new tokens, by option or by context"""
    check_count("max_new_tokens", max_new_tokens)
    check_prompt(prompt, target)
    if target.max_length is None:
        return max_new_tokens
    return min(max_new_tokens, target.max_length - len(prompt))
