"""From what a user names to what the loop takes: the drafter and the draft length."""

from __future__ import annotations

from outrider.costs import measured_costs
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength
from outrider.drafters import ChoiceDrafter, Drafter, ModelDrafter, PromptLookupDrafter
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


def make_length(num_draft_tokens: int | DraftLength | None, target: LanguageModel, drafter: Drafter | None) -> DraftLength:
    """The policy that a `num_draft_tokens` argument means: fixed, adaptive (None) at measured costs, or itself."""
    costs = measured_costs(target)
    if drafter is None:
        return FixedLength(0)
    drafter.measure()
    if isinstance(num_draft_tokens, DraftLength):
        return num_draft_tokens
    if num_draft_tokens is None:
        return AdaptiveLength(costs)
    if isinstance(drafter, ChoiceDrafter) and num_draft_tokens:
        FixedLength(num_draft_tokens)  # checks the range
        return AdaptiveLength(costs, only=num_draft_tokens)
    return FixedLength(num_draft_tokens)
