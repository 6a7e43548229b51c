"""What an engine keeps of the promise that a seed's text depends on no draft."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

from outrider.models.base import TextModel, has_same_bits

_log = logging.getLogger(__name__)
_FINE = ("float32", "float64")
_told: WeakSet[Any] = WeakSet()


def tell_of_rounding(target: TextModel) -> None:
    """Say once where passes of other widths round so coarsely that it will be seen (docs/batch.md has figures)."""
    if has_same_bits(target) or target.dtype_name in _FINE or target in _told:
        return
    _told.add(target)
    _log.warning(
        "passes of %s in %s round otherwise in other widths: in spite of drafter_invariant a token in fifty or so may be "
        "another one than without a draft; dtype float32 or int8 is finer",
        target.name,
        target.dtype_name,
    )
