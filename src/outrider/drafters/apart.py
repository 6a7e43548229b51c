"""A drafter for one generation: what it is bound to and measures is its own; models, tables and memories are shared."""

from __future__ import annotations

import copy

from outrider.drafters.base import Drafter
from outrider.drafters.checked import is_ours


def apart(drafter: Drafter) -> Drafter:
    """The same once more, with the drafters inside of it. One of a user's own class stays what it is: who knows what a copy
    of it would share.
    """
    if not is_ours(drafter):
        return drafter
    own = copy.copy(drafter)
    for name, value in vars(drafter).items():
        if isinstance(value, Drafter):
            setattr(own, name, apart(value))
        elif isinstance(value, list) and any(isinstance(one, Drafter) for one in value):
            setattr(own, name, [apart(one) if isinstance(one, Drafter) else one for one in value])
    return own
