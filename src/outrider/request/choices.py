"""From what a user names to what the loop takes: the drafter and the draft length."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cache

from outrider.costs import ByRows, CostBook, SharedCosts, book_now, costs_by, costs_of_a_list, measured_costs, pad_as_known
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength, OptimalLength, optimal_length
from outrider.drafters import ChoiceDrafter, Drafter, ModelDrafter
from outrider.drafters.apart import apart
from outrider.drafters.base import bind_alone
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel
from outrider.request.draft_specs import AUTO, NAMED, is_named, meant_by
from outrider.request.from_specs import make_model_drafter, make_named
from outrider.support.alone import Alone

Draft = str | LanguageModel | Drafter | Many["str | LanguageModel | Drafter"] | None
"""A loaded model, a drafter's name with its options (`draft_specs`), a drafter of one's own, several of these, or None for
plain decoding."""


def make_drafter(draft: Draft, target: LanguageModel) -> Drafter | None:
    """The drafter that a `draft` argument means."""
    if draft is None or isinstance(draft, Drafter):
        return draft
    if isinstance(draft, str):
        if is_named(draft):
            return make_named(draft, target)
        names, meant = ", ".join((AUTO, *NAMED)), meant_by(draft)
        what = f"did you mean {meant!r}" if meant is not None else f"outrider.load({draft!r})"
        raise ParameterError(f"draft must be a loaded model or one of {names}, got {draft!r}: {what}?")
    if isinstance(draft, LanguageModel):
        return make_model_drafter(draft, target)
    if isinstance(draft, list | tuple) and draft:
        made = [one for one in (make_drafter(each, target) for each in draft) if one is not None]
        if len(made) < len(draft):
            raise ParameterError("draft must hold drafts, got None: leave it out, not to draft is always a choice")
        return ChoiceDrafter(made)
    got = "an empty list" if isinstance(draft, list | tuple) else type(draft).__name__
    how = ": load it with outrider.load(model, tokenizer=…)" if hasattr(draft, "state_dict") else ""
    raise ParameterError(f"draft must be a loaded model, a drafter, its name, a list of these or None, got {got}{how}")


def bound_drafter(draft: Draft, target: LanguageModel) -> Drafter | None:
    """The same, bound to the target, while no other thread runs passes of its engines. A copy, if it comes with this
    package: others may bind the same object to their targets, or measure it in passes of other rows, while it drafts here.
    """
    made = Alone([target]).run(make_drafter, draft, target)
    if made is None:
        return None
    bind_alone(made, target)  # itself, so that what that has found is there for the next call, too
    own = apart(made)
    if own is not made:
        bind_alone(own, target)  # others may have bound it since
    return own


Length = int | OptimalLength | DraftLength | None


def make_length(num_draft_tokens: Length, target: LanguageModel, drafter: Drafter | None, rows: int = 1) -> DraftLength:
    """The policy that a `num_draft_tokens` argument means: fixed, adaptive (None), or optimal for some alpha.

    rows: of a pass, unless a `CostBook` says it. Costs are measured where something follows from them. Where nothing drafts
    the argument is checked and has no effect, so that a comparison need not change it with the draft.
    """
    wanted = num_draft_tokens
    policy = wanted if isinstance(wanted, OptimalLength | DraftLength | None) else FixedLength(wanted)  # checks the range
    if drafter is None:
        pad_as_known(target)
        return FixedLength(0)
    with costs_of_a_list(rows):
        if rows > 1 and isinstance(policy, FixedLength) and len(drafter.parts()) == 1:  # and there is nothing to pad
            if not isinstance(drafter, ModelDrafter):  # one with a draft of its own may need it
                drafter.measure()
            return policy
        costs = measured_costs(target)
        drafter.measure()
        book = book_now()
        by_rows = None if book is None or book.rows == 1 or wanted is not None else _by_rows(target, drafter, book)
    if isinstance(wanted, DraftLength):
        return wanted
    if isinstance(policy, OptimalLength):
        if len(drafter.parts()) > 1:
            raise ParameterError(
                f"num_draft_tokens can't be optimal for several drafters at once ({drafter.name}): name one, or leave "
                "it adaptive"
            )
        return FixedLength(optimal_length(policy.alpha, costs, drafter.seconds))
    if isinstance(policy, FixedLength):
        several = isinstance(drafter, ChoiceDrafter) and policy.length
        return AdaptiveLength(costs, only=policy.length) if several else policy
    return AdaptiveLength(costs, by_rows=by_rows)


def _by_rows(target: LanguageModel, drafter: Drafter, book: CostBook) -> ByRows:
    """What passes and drafts take with fewer rows than the book's, measured now as far as it has to be: later others may
    draft with this drafter, by tables that hold for a whole run.
    """
    whole = drafter.part_seconds()
    with costs_by(book.of_fewer(1)):
        book.of_fewer(1).of(target)
        drafter.measure()
        alone = drafter.part_seconds()
    with costs_by(book):
        drafter.measure()  # as it was
    least = {name: alone[name].of(1) / seconds.of(1) for name, seconds in whole.items() if seconds.of(1) > 0.0}

    @cache
    def shared(rows: int) -> SharedCosts:
        more = (rows - 1) / (book.rows - 1)
        times = {name: times + more * (1.0 - times) for name, times in least.items()}
        return SharedCosts(book.of_fewer(rows).of(target), times)

    return shared
