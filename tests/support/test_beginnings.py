"""The length of a common beginning."""

from __future__ import annotations

import pytest

from outrider.support.beginnings import common_length


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_length_of_what_both_begin_with(kind: type) -> None:
    for a, b, length in (([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2, 3], [1, 4, 3], 1)):
        assert common_length(kind(a), kind(b)) == common_length(kind(b), kind(a)) == length
