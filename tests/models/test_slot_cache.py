"""The cache of slots by itself: memory that lacks while it grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.models.cache import slot_cache
from outrider.models.cache.slot_cache import SlotCache


@pytest.mark.parametrize("slots", [1, 3])
def test_a_growth_that_memory_lacks_for_leaves_what_there_was(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SlotCache(4)
    for layer in cache.layers:
        layer.lazy_initialization(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    cache.reach(0, 5)
    for number, layer in enumerate(cache.layers):
        assert layer.keys is not None
        layer.keys[0, :, :5] = number
    sizes = cache.num_slots, cache.capacity
    grow, large = slot_cache._grown, 100_000
    asked = 0

    def lacking(old: Tensor, slots: int, capacity: int, used: int) -> Tensor:
        nonlocal asked
        asked += capacity >= large
        if capacity >= large and asked > 5:
            raise torch.OutOfMemoryError("no memory")
        return grow(old, slots, capacity, used)

    monkeypatch.setattr(slot_cache, "_grown", lacking)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(slots, large)
    assert asked == 6
    assert (cache.num_slots, cache.capacity) == sizes
    cache.reserve(1, 20)  # others need less, and have it
    for number, layer in enumerate(cache.layers):
        held: Any = layer.keys
        assert held.shape == (sizes[0], 2, sizes[1], 8)
        assert (held[0, :, :5] == number).all()
