"""What passes cost at the moment of a run, so that its prediction is not that of a quicker or slower hour.

A machine's speed drifts by tens of per cent between a cost table and the runs that it is to predict, by more than what is to
be shown. Timed just before and just after each run, at the middle of its context, the drift is on both sides.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from outrider.costs import CONTEXT, Costs
from outrider.costs.pass_timer import PassTimer, can_pretend
from outrider.drafters import Drafter, ModelDrafter
from outrider.models.base import LanguageModel

REPEATS = 2


@dataclass(frozen=True)
class Moment:
    """Seconds of passes after so many tokens. verify: {tokens: of the target}, 1 included. steps: {draft model: a token}."""

    verify: dict[int, float]
    steps: dict[str, float]
    context: int

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> Moment:
        """From JSON, whose keys are strings."""
        return cls({int(n): float(s) for n, s in held["verify"].items()}, held["steps"], int(held["context"]))

    @property
    def costs(self) -> Costs:
        return Costs(self.verify, context=self.context)


def time_moment(target: LanguageModel, draft: Drafter, length: int, context: int) -> Moment:
    """Time what rounds that draft so many tokens consist of, in the order of rounds and widths not mixed.

    Means, not medians: what is predicted is a sum of passes, the slow ones included.
    """
    sizes = dict.fromkeys((length + 1, 1))
    with ExitStack() as stack:
        scoring = stack.enter_context(PassTimer(target, sizes, _context(target, context, length + 1)))
        models = [part for part in draft.parts() if length and isinstance(part, ModelDrafter)]
        drafting = {
            part.name: stack.enter_context(PassTimer(part.model, (1,), _context(part.model, context, 1))) for part in models
        }
        verify: dict[int, list[float]] = {size: [] for size in scoring.sizes}
        steps: dict[str, list[float]] = {name: [] for name in drafting}
        for size, scored in verify.items():
            for repeat in range(REPEATS + 1):  # the first one warms up: an engine may prepare for another width
                for name, timer in drafting.items():
                    took = [timer.time(1, again=token > 0) for token in range(length if size > 1 else 1)]
                    if repeat:
                        steps[name] += took
                seconds = scoring.time(size)
                if repeat:
                    scored.append(seconds)
    return Moment(
        {n: fmean(taken) for n, taken in verify.items()}, {name: fmean(taken) for name, taken in steps.items()}, context
    )


def mean_moment(moments: list[Moment]) -> Moment:
    """The means over runs, each size over the runs that have it."""
    sizes = sorted({size for one in moments for size in one.verify})
    names = sorted({name for one in moments for name in one.steps})
    return Moment(
        {size: fmean(one.verify[size] for one in moments if size in one.verify) for size in sizes},
        {name: fmean(one.steps[name] for one in moments if name in one.steps) for name in names},
        round(fmean(one.context for one in moments)),
    )


def _context(model: LanguageModel, context: int, size: int) -> int:
    """The context to time at: a short one where it would have to be read first."""
    context = context if can_pretend(model) else min(context, CONTEXT)
    return context if model.max_length is None else max(1, min(context, model.max_length - size))
