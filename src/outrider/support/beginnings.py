"""What sequences begin with."""

from __future__ import annotations

from collections.abc import Sequence as Many


def common_length(a: Many[int], b: Many[int]) -> int:
    """The length of what two lists, or two tuples, both begin with."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:  # the usual case, compared by C
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
