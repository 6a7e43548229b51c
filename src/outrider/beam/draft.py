"""The draft's part of speculative beam search (Leviathan A.4): it runs the same search ahead of the target.

Its steps start from the target's own running hypotheses and scores, and go through the same `advance`, so that with a
perfect draft every hypothesis that the target will want is among those drafted. What is drafted can't bend the result: it
only says which hypotheses the target is asked about.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.beam.rows import BeamRows
from outrider.beam.state import BeamState, Continuations, Path, Rules, advance
from outrider.beam.task import BeamTask
from outrider.drafters import Drafter, ModelDrafter, SelfDrafter
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel
from outrider.models.compatibility import share_source


class BeamDraft:
    """A model that drafts hypotheses for one search.

    A source is read by its own encoder, or, if it has none, in front of the prompt. width: hypotheses that it follows, at
    least num_beams: more are accepted more often, and cost more to check.
    """

    def __init__(self, model: LanguageModel, target: LanguageModel, task: BeamTask, rules: Rules, width: int) -> None:
        share_source(target, model)
        self._rules = rules
        self._width = width
        self._rows = BeamRows(model, task, target.vocab_size, rules.limit)

    def begin(self) -> None:
        """Read the prompt, if it fits."""
        if self._rows.fits(0):
            self._rows.begin()

    def close(self) -> None:
        self._rows.close()

    def ahead(self, state: BeamState, known: Mapping[Path, Continuations], steps: int) -> list[list[Path]]:
        """The running hypotheses after each of up to `steps` further tokens, as the draft foresees them.

        known: the target's own word on hypotheses that it has scored already.
        """
        found: list[list[Path]] = []
        count = self._rules.continuations_needed(self._width)
        while len(found) < steps and self._rows.fits(state.steps):
            laws = {one.tokens: known[one.tokens] for one in state.running if one.tokens in known}
            missing = [one.tokens for one in state.running if one.tokens not in laws]
            if missing:
                laws.update(self._rows.laws(missing, count)[0])
            if any(one.tokens not in laws for one in state.running):  # nothing that the target could say, either
                break
            state = advance(state, laws, self._rules, self._width)
            if state.done:
                break
            found.append([one.tokens for one in state.running])
        return found


def draft_model(drafter: Drafter) -> LanguageModel:
    """The model whose hypotheses a drafter's name means. Raises `ParameterError` for drafters that have none."""
    if type(drafter) not in (ModelDrafter, SelfDrafter) or not isinstance(drafter, ModelDrafter):
        raise ParameterError(
            f"draft {drafter.name} can't draft for beam search: hypotheses are drafted by a model with the target's tokens, "
            "so name one, or leave the draft out"
        )
    if drafter.sampling is not None:
        raise ParameterError(f"draft {drafter.name} can't sample for beam search: leave out its sampling options")
    return drafter.model
