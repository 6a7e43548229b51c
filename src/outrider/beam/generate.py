"""The Python interface to beam search: text in, the best texts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Never

from outrider.beam.draft import draft_model
from outrider.beam.length import BeamLength
from outrider.beam.records import BeamResult, BeamRound, BeamText, EndReason, summarise
from outrider.beam.search import BeamDecoder
from outrider.beam.state import Finished
from outrider.beam.task import task_of
from outrider.errors import ParameterError
from outrider.models.base import TextModel, end_tokens
from outrider.request.choices import Draft, bound_drafter
from outrider.request.prompts import Prompt, prepare, source_length
from outrider.settings.beams import BeamSettings, EarlyStopping
from outrider.support.alone import Alone
from outrider.support.checks import unknown_option
from outrider.support.text import TextTracker


def beam_search(
    target: TextModel,
    prompt: Prompt,
    *,
    num_beams: int,
    draft: Draft = None,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return_sequences: int = 1,
    max_new_tokens: int = 256,
    num_draft_tokens: int | None = None,
    draft_beams: int | None = None,
    ignore_eos: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
    **unknown: Never,
) -> BeamResult:
    """Beam search on one prompt; with a draft, the same texts and scores in fewer passes of the target (Leviathan A.4).

    prompt: for an encoder-decoder it is the source; its generation config's rules hold, as in `generate`.
    num_beams, length_penalty, early_stopping, num_return_sequences: as in transformers (`BeamSettings`).
    draft: a loaded model with the target's tokens, or None for plain beam search.
    num_draft_tokens: steps to draft in each round; None: what pays. draft_beams: hypotheses that the draft follows.

    Beam search maximises and does not sample, so there are no temperature, seed, penalties or constraints here.
    Raises `ParameterError` and the other `OutriderError`s, one clear line each.
    """
    if unknown:
        raise unknown_option(next(iter(unknown)), signature(beam_search).parameters.keys() - {"unknown"}, "beam_search")
    settings = BeamSettings(num_beams, length_penalty, early_stopping, num_return_sequences)
    for name, value in (("num_draft_tokens", num_draft_tokens), ("draft_beams", draft_beams)):
        if draft is None and value is not None:
            raise ParameterError(f"{name} needs a draft, got {value} without one: give draft, or leave it out")
    search = BeamGeneration(
        target, prompt, settings, draft, max_new_tokens, num_draft_tokens, draft_beams, ignore_eos, cancelled
    )
    for _ in search.run():
        pass
    return search.result()


class BeamGeneration:
    """One search with the text around it; arguments as `beam_search`."""

    def __init__(
        self,
        target: TextModel,
        prompt: Prompt,
        settings: BeamSettings,
        draft: Draft = None,
        max_new_tokens: int = 256,
        num_draft_tokens: int | None = None,
        draft_beams: int | None = None,
        ignore_eos: bool = False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        if target.tokenizer is None:
            raise ParameterError(f"target {target.name} has no tokenizer: use outrider.beam.BeamDecoder for token ids")
        drafter = bound_drafter(draft, target)
        self.target, self.settings = target, settings
        begun = Alone([target]).run(prepare, target, prompt)
        task = task_of(target, begun, None if ignore_eos else max_new_tokens)
        self.task = task.with_beams(settings.num_beams)
        self._rounds: list[BeamRound] = []
        self._decoder = BeamDecoder(
            target,
            self.task,
            settings,
            max_new_tokens,
            frozenset() if ignore_eos else end_tokens(target),
            None if drafter is None else draft_model(drafter),
            BeamLength(num_draft_tokens),
            draft_beams,
            cancelled,
        )

    @property
    def steps(self) -> int:
        """Tokens that each running hypothesis has by now."""
        return self._decoder.state.steps

    def run(self) -> Iterator[BeamRound]:
        """The passes, as `BeamDecoder.rounds`."""
        for record in self._decoder.rounds():
            self._rounds.append(record)
            yield record

    def result(self) -> BeamResult:
        """The finished texts; cut short, the running ones as far as they are, where nothing has finished."""
        state, rules = self._decoder.state, self._decoder.rules
        texts = [self._text(one, self._reason(one)) for one in state.finished]
        if not texts:
            running = [one for one in state.running if one.tokens]
            cut = [Finished(o.tokens, o.logprob, rules.score(o.logprob, len(o.tokens)), "length") for o in running]
            texts = [self._text(one, "cancelled") for one in cut] or [BeamText("", [], 0.0, 0.0, "cancelled")]
        stats = summarise(self._rounds, self._decoder.prefill_seconds)
        return BeamResult(
            texts[: self.settings.num_return_sequences],
            stats,
            list(self._rounds),
            len(self.task.prompt),
            source_length(self.task.source),
        )

    def _reason(self, one: Finished) -> EndReason:
        return "context" if one.reason == "length" and self._decoder.cut_by_context else one.reason

    def _text(self, one: Finished, reason: EndReason) -> BeamText:
        tracker = TextTracker(self.target.tokenizer, self.task.prompt)
        tracker(one.tokens)
        tracker.finish()
        return BeamText(tracker.text, list(one.tokens), one.logprob, one.score, reason)
