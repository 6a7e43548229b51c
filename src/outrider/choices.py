"""From what a user names to what the loop takes: the drafter and the draft length."""

from __future__ import annotations

from outrider.costs import Costs, measured_costs
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength
from outrider.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel

Draft = str | LanguageModel | Drafter | None
"""A loaded model, "prompt-lookup", a drafter of one's own, or None for plain decoding."""


def make_drafter(draft: Draft) -> Drafter | None:
    """The drafter that a `draft` argument means."""
    if draft is None or isinstance(draft, Drafter):
        return draft
    if draft == "prompt-lookup":
        return PromptLookupDrafter()
    if isinstance(draft, str):
        raise ParameterError(f'draft must be "prompt-lookup" or a loaded model, got {draft!r}: outrider.load({draft!r})?')
    if isinstance(draft, LanguageModel):
        return ModelDrafter(draft)
    raise ParameterError(f"draft must be a loaded model, a drafter, 'prompt-lookup' or None, got {type(draft).__name__}")


def make_length(num_draft_tokens: int | None, target: LanguageModel, drafter: Drafter | None) -> DraftLength:
    """The policy that a `num_draft_tokens` argument means: fixed, or adaptive (None) at the pair's measured costs."""
    costs = pair_costs(target, drafter)
    if num_draft_tokens is not None or drafter is None:
        return FixedLength(num_draft_tokens or 0)
    return AdaptiveLength(costs, drafter.prior)


def pair_costs(target: LanguageModel, drafter: Drafter | None) -> Costs:
    """Measured costs of a target and a drafter; a drafter without a model counts as free."""
    return measured_costs(target, drafter.model if isinstance(drafter, ModelDrafter) else None)
