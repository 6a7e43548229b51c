"""Which of several drafters are made ready: at first, and for rows that are left when others have ended."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

from outrider.draft_length.base import DraftLength
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.checked import check_name
from outrider.drafters.choice import ChoiceDrafter
from outrider.proposal import DraftRow
from outrider.sampling import SamplingSettings


def worth_while(
    drafter: Drafter, length: DraftLength, sampling: SamplingSettings, ready: Drafter | None = None
) -> Drafter | None:
    """What of a drafter is worth making ready (`DraftLength.never`), and what has to see every text; None if nothing is.

    ready: what of it is already, and stays so; returned if nothing is to be added.
    """
    parts, have = parts_of(drafter), parts_of(ready)
    for part in parts:
        check_name(part)
    kept = [
        part for part in parts if part in have or part.remembers or not length.never(part.name, part.seconds_for(sampling))
    ]
    if len(kept) == len(have):
        return ready
    if len(kept) == len(parts):
        return drafter
    return None if not kept else kept[0] if len(kept) == 1 else ChoiceDrafter(kept)


def state_with(drafter: Drafter, before: Drafter | None, row: DraftRow) -> Any:
    """A row's state for what `worth_while` has added something to: with what the drafter before has of it."""
    if type(drafter) is not ChoiceDrafter:
        return None
    if before is None:
        return drafter.state_with({}, row)
    return drafter.state_with(before.children(row) if type(before) is ChoiceDrafter else {id(before): replace(row)}, row)


def begin_rest(drafter: Drafter, before: Drafter | None, rows: Many[DraftRow], context: DraftContext) -> None:
    """Begin what has been added, for rows whose states are made (`state_with`)."""
    if type(drafter) is ChoiceDrafter:
        drafter.begin_but(parts_of(before), rows, context)
    else:
        drafter.begin(rows, context)


def parts_of(drafter: Drafter | None) -> Many[Drafter]:
    """Of a choice those that are chosen from; one of another class is whole, whatever its parts."""
    if drafter is None:
        return ()
    return drafter.drafters if type(drafter) is ChoiceDrafter else [drafter]
