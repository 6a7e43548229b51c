"""What drafters with a model share: what it reads, and the loop that draws a token after another: as far as each row's plan
goes, asking it after each token.

A token that was drawn is offered in any case; a plan decides about the next one only, by what was read of the law (`steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

from torch import Tensor

from outrider.draft_length.base import Plan, only_gated
from outrider.draft_steps.own_tokens import OwnTokens
from outrider.draft_steps.signals import likely_class
from outrider.draft_steps.steps import Steps, Wanted, steps_on
from outrider.drafters.base import DraftContext
from outrider.models.base import LanguageModel, has_encoder
from outrider.proposal import Alternatives, Candidate, DraftRow, Proposal, empty_proposal, padded_alternatives
from outrider.sampling import SamplingSettings
from outrider.settings.drafting import MAX_DRAFT
from outrider.support.device_data import moved


def read_by(model: LanguageModel, row: DraftRow) -> list[int]:
    """The tokens that a draft model's sequence is to hold of a row."""
    return row.tokens if has_encoder(model) else row.reading


def room_after(model: LanguageModel, held: int) -> int:
    """How many tokens a draft model's context still allows after so many: its first pass scores all that is pending."""
    return MAX_DRAFT if model.max_length is None else max(0, min(MAX_DRAFT, model.max_length - held + 1))


def draft_in_steps(
    own: OwnTokens,
    rows: Many[DraftRow],
    plans: Many[Plan],
    limits: list[int],
    sampling: SamplingSettings,
    context: DraftContext,
    advance: Callable[[list[int], Steps | None], Tensor],
) -> Proposal:
    """What a draft model writes of each row, `limits` tokens at most.

    advance: its pass for the active rows, by their places, after the steps so far (None: the first). → logits [A, T] over
    the tokens of `own`.
    """
    lengths = [0] * len(rows)
    signals: list[list[int]] = [[] for _ in rows]
    others: list[list[list[tuple[int, float]]]] = [[] for _ in rows]
    active = [i for i, limit in enumerate(limits) if limit > 0]
    wanted = _wanted(plans, context)
    steps: Steps | None = None
    while active:
        with context.clock.phase("draft"):
            logits = advance(active, steps)
        with context.clock.phase("sampling"):
            steps = steps or steps_on(logits, own, rows, sampling)
            drawn = steps.draw(logits, active, wanted)
            for i, read in drawn.items():
                lengths[i] += 1
                if read is not None:
                    signals[i].append(read.signal)
                    others[i].append(read.others if context.alternatives or plans[i].gated else [])
            active = [i for i in drawn if lengths[i] < limits[i] and _goes_on(plans[i], signals[i], others[i])]
    if steps is None or not any(lengths):
        return empty_proposal(len(rows), context.device)
    longest = max(lengths)
    laws = steps.laws(longest)
    return Proposal(
        moved(steps.tokens(longest), context.device),
        lengths,
        None if laws is None else moved(laws, context.device),
        only_gated(signals, plans),
        _alternatives(signals, others, plans, context),
        [_candidates(found, plan) for found, plan in zip(others, plans, strict=True)],
    ).knowing(steps.known(lengths))


def _wanted(plans: Many[Plan], context: DraftContext) -> Wanted:
    """Where alternatives are counted, all rows are read; else those are for a plan to choose that asks for signals."""
    gated = any(plan.gated for plan in plans)
    return Wanted(gated or bool(context.alternatives), context.alternatives)


def _goes_on(plan: Plan, signals: list[int], others: list[list[tuple[int, float]]]) -> bool:
    return not plan.gated or plan.go_on(signals, _shares(others))


def _shares(others: list[list[tuple[int, float]]]) -> list[list[float]]:
    return [[share for _, share in place] for place in others]


def _alternatives(
    signals: list[list[int]], others: list[list[list[tuple[int, float]]]], plans: Many[Plan], context: DraftContext
) -> Alternatives | None:
    """Those that the plans choose, or as many a place as were asked for. others: per row and place (token, probability)."""
    rows = []
    for known, found, plan in zip(signals, others, plans, strict=True):
        if context.alternatives is None and found:
            chosen = plan.choose(known, _shares(found))
        else:
            chosen = [list(range(len(place))) for place in found]
        rows.append([_candidate(*found[at][m], at) for at, some in enumerate(chosen) for m in some])
    return padded_alternatives(rows, context.device)


def _candidates(others: list[list[tuple[int, float]]], plan: Plan) -> list[Candidate]:
    """All of a row whose plan asks about them: see `only_gated`."""
    if not plan.gated:
        return []
    return [_candidate(token, share, place) for place, found in enumerate(others) for token, share in found]


def _candidate(token: int, share: float, place: int) -> Candidate:
    return token, place, likely_class(share)
