"""Keys and values of the sources: computed once per sequence by each layer's cross attention, kept by slot.

Beside a `SlotCache`, which holds the decoder's own. A slot is written once, when its sequence is opened, and never rolled
back: rejected tokens do not touch the source. Rows hold sources of different length; what lies beyond a row's own source is
the mask's business (`CrossCache.mask`), and holds finite numbers, since 0 × NaN is NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.models.cache.layer import PlacedLayer
from outrider.support.device_data import index
from outrider.support.inference import in_inference_mode


class CrossLayer(PlacedLayer):
    """One layer's, as [slots, heads, longest source, head size]. Models read `keys` and `values` without a call.

    `update` makes the tensors at the size that is needed.
    """

    def __init__(self, owner: CrossCache) -> None:
        self._owner = owner
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        super().__init__()

    @property
    def keys(self) -> Tensor | None:
        """Of the rows in use."""
        return None if self._keys is None else self._owner.rows_of(self._keys)

    @keys.setter
    def keys(self, value: None) -> None:
        """The base class sets None when it is made."""

    @property
    def values(self) -> Tensor | None:
        return None if self._values is None else self._owner.rows_of(self._values)

    @values.setter
    def values(self, value: None) -> None:
        """The base class sets None when it is made."""

    @property
    def columns(self) -> int:
        return self._owner.longest

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Keep one source's [1, heads, S, size] states in the slot that is being filled, and return them."""
        self._keys = self._owner.keep(self._keys, key_states)
        self._values = self._owner.keep(self._values, value_states)
        self.is_initialized = True
        return key_states, value_states

    def copy(self, source: int, length: int) -> None:
        """Keep what one slot holds in the slot that is being filled."""
        if self._keys is not None and self._values is not None:
            self._keys = self._owner.keep(self._keys, self._keys[source : source + 1, :, :length])
            self._values = self._owner.keep(self._values, self._values[source : source + 1, :, :length])


class SourceLayer(PlacedLayer):
    """One layer's keys and values of the rows at hand, [R, heads, S, size], for a pass that only reads them."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    @property
    def columns(self) -> int:
        return int(self.keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Never called: a source that has been read does not grow."""
        raise RuntimeError("a model adds to the keys of a source that has been read")


class CrossCache(Cache):  # type: ignore[misc]
    """The cross attention of one model. `filling`: the slot that the next pass writes. `slots`: those that it reads."""

    layers: list[CrossLayer]

    def __init__(self, num_layers: int) -> None:
        self.filling = 0
        self.slots: tuple[int, ...] = ()
        self._lengths: dict[int, int] = {}
        super().__init__(layers=[CrossLayer(self) for _ in range(num_layers)])

    @property
    def held(self) -> list[Tensor]:
        """Each layer's keys and values of all slots."""
        every = [tensor for layer in self.layers for tensor in (layer._keys, layer._values)]
        return [tensor for tensor in every if tensor is not None]

    @property
    def longest(self) -> int:
        """The length of the longest source among the rows in use."""
        return max(self._lengths[slot] for slot in self.slots)

    def mask(self, device: torch.device, additive: torch.dtype | None = None) -> Tensor:
        """What each row in use may see of its source. bool or 0 / -large [R, 1, 1, longest]"""
        lengths = index([self._lengths[slot] for slot in self.slots], device)
        visible = (torch.arange(self.longest, device=device) < lengths.unsqueeze(-1))[:, None, None, :]
        if additive is None:
            return visible
        return torch.zeros(visible.shape, dtype=additive, device=device).masked_fill_(~visible, torch.finfo(additive).min)

    def rows_of(self, held: Tensor) -> Tensor:
        """The rows in use, a view if their slots are contiguous. → [R, heads, longest, size]"""
        first, last = self.slots[0], self.slots[-1]
        rows = held[first : last + 1] if last - first + 1 == len(self.slots) else held[index(self.slots, held.device)]
        return rows[:, :, : self.longest]

    def keep(self, held: Tensor | None, states: Tensor) -> Tensor:
        """Write one source into the slot that is being filled, in a larger tensor if need be. → the tensor"""
        length = states.shape[2]
        self._lengths[self.filling] = length
        slots, longest = (0, 0) if held is None else (held.shape[0], held.shape[2])
        if held is None or self.filling >= slots or length > longest:
            grown = states.new_zeros(_more(slots, self.filling + 1), states.shape[1], max(longest, length), states.shape[3])
            if held is not None:
                grown[:slots, :, :longest] = held
            held = grown
        held[self.filling, :, :length] = states[0]
        held[self.filling, :, length:] = 0  # an earlier source may have left a NaN there
        return held

    @in_inference_mode  # its tensors are made in that mode and can be written in no other
    def copy(self, source: int, target: int) -> None:
        """Copy one sequence's source to another slot, in every layer."""
        self.filling = target
        for layer in self.layers:
            layer.copy(source, self._lengths[source])


def _more(have: int, wanted: int) -> int:
    """How many slots to make: half as many again, so that the copying stays in proportion to the end."""
    return max(wanted, have + have // 2) if wanted > have else have
