"""One preallocated key/value cache whose rows are slots: ragged batches and roll-back by length, for any attention model.

Every sequence owns a row ("slot") of each layer's [slots, heads, capacity, head size] tensors. A forward pass scatters the
new keys and values at each row's own positions and attends to the rows in use; which positions a query may see is the
mask's business (`masks`). Rolling back is setting a length: what lies beyond is overwritten before it is ever attended to.

Rows are returned as views wherever they are contiguous, since a gather would copy the whole cache in every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.kernels.chain_calls import Place
from outrider.models.cache.layer import PlacedLayer
from outrider.support.device_data import index
from outrider.support.inference import in_inference_mode

MIN_CAPACITY = 256
ROOMY = 4  # times the capacity that is needed, which is given back where no sequence is open
# What transformers' models call their cache, by version: from 5.24 on, before, and before where there is no attention.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(takes: Collection[str]) -> str:
    """What a model that takes these arguments calls its cache; one that does not say calls it as others do."""
    others = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
    return next((name for name in CACHE_NAMES if name in takes), others)


@dataclass(frozen=True)
class Placement:
    """Where one forward pass writes and what it reads.

    slots: the rows, ascending. starts: each row's first column. positions: int64 [R, N], the columns starts + 0 … N-1.
    length: columns read, at least every one written + 1.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    positions: Tensor
    length: int

    @property
    def span(self) -> slice | None:
        """The rows as a slice, if they are contiguous."""
        first, last = self.slots[0], self.slots[-1]
        return slice(first, last + 1) if last - first + 1 == len(self.slots) else None


@dataclass(eq=False)
class View:
    """Keys and values of some slots, layer after layer, as long as they are where they are.

    made: what whoever reads them has made of their addresses.
    """

    rows: list[Tensor]
    made: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)


class SlotLayer(PlacedLayer):
    """The keys and values of one layer."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    @property
    def columns(self) -> int:
        return self._owner.placement.length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty: masked positions get weight 0, and 0 × NaN would be NaN.
        self.keys, self.values = (self._zeros(states) for states in (key_states, value_states))
        self.is_initialized = True

    def _zeros(self, like: Tensor) -> Tensor:
        shape = (self._owner.num_slots, like.shape[1], self._owner.capacity, like.shape[3])
        return like.new_zeros(shape, dtype=self._owner.kept_dtype or like.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Store the new [R, heads, N, size] states and return those of the rows in use, [R, heads, length, size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        place = self._owner.placement
        return _store(self.keys, key_states, place), _store(self.values, value_states, place)

    def resize(self, slots: int, capacity: int, used: int) -> None:
        """Grow both tensors, or give back what is not in use, keeping what they hold in the first `used` positions of each
        slot: there is no more.
        """
        if self.is_initialized and self.keys is not None and self.values is not None:
            self.keys, self.values = (_grown(old, slots, capacity, used) for old in (self.keys, self.values))

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy the positions start … length - 1 of one slot to another."""
        for tensor in (self.keys, self.values):
            if tensor is not None:
                tensor[target, :, start:length] = tensor[source, :, start:length]

    def copy_column(self, slot: int, source: int, target: int) -> None:
        """What one position of a slot holds, to another."""
        for tensor in (self.keys, self.values):
            if tensor is not None:
                row = tensor[slot]
                row[:, target] = row[:, source]


class StateLayer(SlotLayer):
    """A hidden state of each position, [slots, 1, capacity, width], rolled back with the keys and values."""

    def put(self, states: Tensor) -> None:
        """Store the [R, N, width] states of the pass at the placement."""
        _write(self._made_for(states), states.unsqueeze(1), self._owner.placement)

    def put_flat(self, slots: Tensor, positions: Tensor, states: Tensor) -> None:
        """Store the [N, width] states of these positions of these slots, int64 [N] each."""
        kept = self._made_for(states)
        kept[:, 0].index_put_((slots, positions), states.to(kept.dtype))

    def _made_for(self, states: Tensor) -> Tensor:
        if not self.is_initialized:
            self.keys = states.new_zeros(self._owner.num_slots, 1, self._owner.capacity, states.shape[-1])
            self.is_initialized = True
        assert self.keys is not None
        return self.keys

    def place(self, slot: int, position: int, count: int) -> Place | None:
        """Where the states of so many positions from that one on lie; None while there is no place, or none in float32."""
        kept = self.keys
        if kept is None or kept.dtype is not torch.float32 or slot >= kept.shape[0] or position + count > kept.shape[2]:
            return None
        width = kept.shape[3]
        return kept.data_ptr() + 4 * width * (slot * kept.shape[2] + position), width

    def between(self, slot: int, start: int, stop: int) -> Tensor:
        """The states of some positions, [1, N, width], as a view."""
        kept = self.keys
        assert kept is not None
        width = kept.shape[3]
        at = kept.storage_offset() + width * (slot * kept.shape[2] + start)
        return kept.as_strided((1, stop - start, width), (width * (stop - start), width, 1), at)

    def resize(self, slots: int, capacity: int, used: int) -> None:
        if self.is_initialized and self.keys is not None:
            self.keys = _grown(self.keys, slots, capacity, used)


def _store(cache: Tensor, states: Tensor, place: Placement) -> Tensor:
    """Write at the placement; → the columns that are read of the rows in use."""
    _write(cache, states, place)
    rows = cache[place.span] if place.span is not None else cache[index(place.slots, cache.device)]
    return rows[:, :, : place.length]


def _write(cache: Tensor, states: Tensor, place: Placement) -> None:
    span = place.span
    if len(place.slots) == 1:  # the common case, by slices: several times cheaper than indexing
        cache[span, :, place.starts[0] : place.starts[0] + states.shape[2]] = states
    elif span is not None:
        rows = cache[span]
        each = torch.arange(len(rows), device=cache.device).unsqueeze(-1)
        rows[each, :, place.positions] = states.transpose(1, 2).to(rows.dtype)
    else:
        slots = index(place.slots, cache.device)
        cache[slots.unsqueeze(-1), :, place.positions] = states.transpose(1, 2).to(cache.dtype)


def _grown(old: Tensor, slots: int, capacity: int, used: int) -> Tensor:
    if (old.shape[0], old.shape[2]) == (slots, capacity):
        return old
    new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])  # pages that nobody wrote to cost nothing
    kept = min(slots, old.shape[0])
    new[:kept, :, :used] = old[:kept, :, :used]
    return new


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of one model: as many layers as it has, slots handed out lowest first and kept compact.

    kept_dtype: of keys and values, None: as the model makes them.
    """

    layers: list[SlotLayer]

    def __init__(self, num_layers: int, kept_dtype: torch.dtype | None = None) -> None:
        self.kept_dtype = kept_dtype
        self.num_slots = 1
        self.capacity = MIN_CAPACITY
        self._whole = True  # whether all layers have these sizes
        self._placement: Placement | None = None
        self._used: dict[int, int] = {}  # how far each slot was ever written
        self.states: dict[int, StateLayer] = {}  # by the layer they come from; the model never sees them
        self.views: dict[tuple[int, int], View] = {}  # of some slots, for whoever reads them in each pass
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    @property
    def placement(self) -> Placement:
        """Set by the model before each forward pass."""
        assert self._placement is not None
        return self._placement

    @placement.setter
    def placement(self, value: Placement) -> None:
        self._placement = value
        for slot, start in zip(value.slots, value.starts, strict=True):
            self.reach(slot, start + value.positions.shape[1])

    def reach(self, slot: int, stop: int) -> None:
        """Note that positions before this one are written."""
        self._used[slot] = max(self._used.get(slot, 0), stop)

    @property
    def form(self) -> tuple[object, ...]:
        """What is kept of a token, and how."""
        return self.kept_dtype, *self.states, len(self._tensors())

    def keep_states(self, layer: int) -> None:
        """Hold the hidden states after that layer, too, from now on."""
        self.states.setdefault(layer, StateLayer(self))

    def like(self) -> Self:
        """An empty one of a single slot, for the same layers and states."""
        twin = type(self)(len(self.layers), self.kept_dtype)
        for layer, mine in zip(self.layers, twin.layers, strict=True):
            if layer.keys is not None and layer.values is not None:
                mine.lazy_initialization(layer.keys, layer.values)
        for number in self.states:
            twin.keep_states(number)
        return twin

    @property
    def _held(self) -> list[SlotLayer]:
        return [*self.layers, *self.states.values()]

    @in_inference_mode  # its tensors are made in that mode and can be written in no other
    def reserve(self, slots: int, capacity: int) -> None:
        """Make room. Both grow by a share of what they are, so that all the copying stays in proportion to the end."""
        slots = max(slots, self.num_slots + self.num_slots // 2) if slots > self.num_slots else self.num_slots
        if capacity > self.capacity:
            capacity = max(capacity, 2 * self.capacity)
        capacity = max(capacity, self.capacity)
        if not self._whole:  # layers that had grown when that was interrupted, or memory lacked
            slots, capacity = (max(size, *grown) for size, grown in zip((slots, capacity), self._sizes(), strict=True))
        elif (slots, capacity) == (self.num_slots, self.capacity):
            return
        self._resize(slots, capacity, max(self._used.values(), default=0))  # a batch is opened row by row, nothing written

    def _resize(self, slots: int, capacity: int, used: int) -> None:
        before = self.num_slots, self.capacity, self._whole
        self._whole = False
        self.views.clear()  # they would keep the tensors that are replaced here
        try:
            for layer in self._held:
                layer.resize(slots, capacity, used)
        except Exception:  # no memory: what has grown would keep others, who need less, from being given any
            with suppress(Exception):
                for layer in self._held:
                    layer.resize(*before[:2], used)
                self._whole = before[2]
            raise
        self.num_slots, self.capacity, self._whole = slots, capacity, True

    @in_inference_mode
    def fit(self, capacity: int) -> None:
        """Give back what one long text has taken in every slot, if it is many times what is needed now. No slot is in use.

        On a GPU passes are captured with the addresses that there are, and capturing anew costs more.
        """
        wanted = max(capacity, MIN_CAPACITY)
        held = next((layer.keys for layer in self._held if layer.keys is not None), None)
        if held is not None and held.device.type == "cpu" and self._whole and self.capacity > ROOMY * wanted:
            self._used.clear()
            self._resize(self.num_slots, wanted, 0)

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Slots and capacity of what is kept, 0 among them."""
        held = self._tensors()
        return [0, *(tensor.shape[0] for tensor in held)], [0, *(tensor.shape[2] for tensor in held)]

    def largest(self) -> float:
        """The largest number that it keeps, by its size; NaN if one is none."""
        held = [tensor.abs().max() for layer in self.layers for tensor in (layer.keys, layer.values) if tensor is not None]
        return float(torch.stack(held).max()) if held else 0.0

    @in_inference_mode
    def keep_in(self, dtype: torch.dtype) -> None:
        """Keep keys and values in another type from now on. No sequence is open."""
        self.kept_dtype = dtype
        self.views.clear()
        for layer in self.layers:
            layer.keys, layer.values = (None if kept is None else kept.to(dtype) for kept in (layer.keys, layer.values))

    def drop(self) -> None:
        """Give all memory back: no slot is in use, and nobody holds an address."""
        self.num_slots, self.capacity, self._whole = 1, MIN_CAPACITY, True
        self._used.clear()
        self.views.clear()
        for layer in self._held:
            layer.keys = layer.values = None  # type: ignore[assignment]
            layer.is_initialized = False

    @in_inference_mode
    def clear(self, slot: int, start: int = 0) -> None:
        """Overwrite what an earlier sequence wrote into a slot, from position `start` on: a NaN left there would spread,
        since 0 × NaN is NaN.
        """
        used = self._used.get(slot, 0)
        for layer in self._held if used > start else ():
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[slot, :, start:used].zero_()
        self._used[slot] = min(used, start)

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._held for tensor in (layer.keys, layer.values) if tensor is not None]

    @in_inference_mode
    def copied(self, slot: int, start: int, stop: int) -> list[Tensor]:
        """What is kept of some positions of a slot, in memory of its own."""
        return [tensor[slot, :, start:stop].clone() for tensor in self._tensors()]

    @in_inference_mode
    def put(self, slot: int, start: int, parts: Sequence[list[Tensor]]) -> None:
        """Store what was copied of other slots, one part after the other, from position `start` on."""
        held = self._tensors()
        for part in parts:
            stop = start + part[0].shape[1]
            for tensor, kept in zip(held, part, strict=True):
                tensor[slot, :, start:stop] = kept
            self.reach(slot, stop)
            start = stop

    @in_inference_mode
    def copy_column(self, slot: int, source: int, target: int) -> None:
        """What one position of a slot holds, to another, in every layer."""
        for layer in self._held:
            layer.copy_column(slot, source, target)

    @in_inference_mode
    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """Copy a sequence to another slot, from position `start` on, in every layer."""
        self._used[target] = max(self._used.get(target, 0), length)
        for layer in self._held:
            layer.move(source, target, length, start)
