"""What engines with a slot cache share: sequences that own a row each, opened, closed and scored in the rows' order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.base import Sequence, WhichLogits, represented
from outrider.models.cache.prefix_cache import BLOCK, PrefixCache
from outrider.models.cache.slot_cache import SlotCache, SlotLayer
from outrider.models.engine_checks import check_score, check_truncate
from outrider.support.device_data import index
from outrider.support.inference import in_inference_mode


class SlotSequence:
    """A row of its model's slot cache."""

    def __init__(self, model: SlotModel[Any], slot: int) -> None:
        self.model = model
        self.slot = slot
        self._length = 0
        self.beside: range = range(0)  # the columns of the alternatives of the last pass
        self.taken = 0  # tokens that were read by others
        self.states = tuple(model._cache.states)  # the layers whose states are kept of all its tokens

    @property
    def length(self) -> int:
        return self._length

    def truncate(self, length: int) -> None:
        check_truncate(length, self._length)
        self._length = length

    def advance(self, count: int) -> None:
        """Called by the model after it has scored `count` tokens."""
        self._length += count
        self.beside = range(0)

    def close(self) -> None:
        self.model.release(self)


S = TypeVar("S", bound=SlotSequence)


_looked: ContextVar[set[int] | None] = ContextVar("looked", default=None)


@contextmanager
def opening_several() -> Iterator[None]:
    """Within it a model looks once whether it is what it was, not for each sequence that is opened: a millisecond each."""
    before = _looked.set(_looked.get() or set())
    try:
        yield
    finally:
        _looked.reset(before)


class SlotModel(ABC, Generic[S]):
    """A model whose open sequence i owns slot i of its cache, so that the slots in use stay contiguous."""

    prefix_cache: PrefixCache | None = None

    def __init__(self, num_layers: int) -> None:
        self._cache = SlotCache(num_layers)
        self._open: list[S] = []

    def __repr__(self) -> str:
        return represented(self)  # type: ignore[arg-type]

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def max_length(self) -> int | None: ...

    @abstractmethod
    def _score(self, rows: list[S], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        """`score_few`, rows in the order of their slots, unless `_takes_any_order`."""

    def _takes_any_order(self, rows: list[S], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> bool:
        """Whether `_score` takes these rows as they come: putting logits in order afterwards would copy them all."""
        del rows, tokens, lengths, logits
        return False

    def _enter(self, sequence: S, reserve: int) -> S:
        """Open a sequence that was made for the next free slot."""
        looked = _looked.get()
        if looked is None or id(self) not in looked:
            self._look_again()
        if looked is not None:
            looked.add(id(self))
        if not self._open:
            self._cache.fit(reserve)
        self._cache.reserve(len(self._open) + 1, reserve)
        self._cache.clear(sequence.slot)
        self._open.append(sequence)  # last: of one that an interrupt kept from being opened nobody knows
        return sequence

    def _look_again(self) -> None:
        """What a model checks before a sequence is opened."""

    def cache_rows(self, slots: slice) -> list[Tensor]:
        """Each layer's keys and values of some slots, [R, heads, capacity, size], as views."""
        held = [tensor for layer in self._keyed_layers() for tensor in (layer.keys, layer.values)]
        found = [tensor[slots] for tensor in held if tensor is not None]
        if len(found) < len(held):
            raise RuntimeError("some of its layers keep no keys, or not yet")
        return found

    def _keyed_layers(self) -> Many[SlotLayer]:
        """Those with keys and values."""
        return self._cache.layers

    def release(self, sequence: S) -> None:
        """Free a sequence's slot; the last sequence moves into it. Until that is done it is an open one: should this be
        interrupted, it can be released again.
        """
        if sequence not in self._open:
            return
        *rows, last = self._open
        if last is not sequence:
            self._cache.move(last.slot, sequence.slot, last.length)
            self._cache.clear(sequence.slot, last.length)
            last.slot, last.beside = sequence.slot, range(0)
            rows[last.slot] = last
        self._open[:] = rows

    def give_back(self) -> None:
        """Free the cache's memory, which is kept otherwise, if no sequence is open; for engines without recorded passes."""
        if not self._open:
            self._cache.drop()

    @property
    def keeps_prefixes(self) -> bool:
        """See `KeepsPrefixes`."""
        return False

    @property
    def kept_form(self) -> object:
        """See `KeepsPrefixes`."""
        return self._cache.form

    def keeps_all_of(self, sequence: Sequence) -> bool:
        """See `KeepsPrefixes`."""
        return self._own(sequence).states == tuple(self._cache.states)

    def note_taken(self, sequence: Sequence, count: int) -> None:
        """See `KeepsPrefixes`."""
        self._own(sequence).taken += count

    def block_of(self, sequence: Sequence, start: int) -> list[Tensor]:
        """See `KeepsPrefixes`."""
        return self._cache.copied(self._own(sequence).slot, start, start + BLOCK)

    def append_blocks(self, sequence: Sequence, blocks: Many[list[Tensor]]) -> None:
        """See `KeepsPrefixes`."""
        row = self._own(sequence)
        self._cache.reserve(len(self._open), row.length + BLOCK * len(blocks))
        self._cache.put(row.slot, row.length, blocks)
        row.advance(BLOCK * len(blocks))

    def _is_open(self, sequence: Sequence) -> bool:
        return sequence in self._open

    def _own(self, sequence: Sequence) -> S:
        """Raise `ParameterError` unless the sequence is one of this model's."""
        if not isinstance(sequence, SlotSequence) or not self._is_open(sequence):
            raise ParameterError(f"sequences must be open sequences of {self.name}, got {sequence!r}")
        return cast(S, sequence)

    def over_vocabulary(self, out: Tensor) -> Tensor:
        """What `_score` gives, for every token: -inf for those without a row in the head. [.., T] → [.., V]"""
        return out

    @in_inference_mode
    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        out = self.score_few(sequences, tokens, lengths, logits)
        return None if out is None else self.over_vocabulary(out)

    @in_inference_mode
    def score_few(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        """See `FewTokens`."""
        rows = [self._own(sequence) for sequence in sequences]
        check_score(self.name, self.max_length, rows, lengths, tokens.shape[1])
        order = order_by_slot(rows)
        if order is None or self._takes_any_order(rows, tokens, lengths, logits):
            return self._score(rows, tokens, lengths, logits)
        at = index(order, tokens.device)
        out = self._score([rows[i] for i in order], tokens[at], [lengths[i] for i in order], logits)
        return None if out is None else out[at.argsort()]


def order_by_slot(rows: Many[SlotSequence]) -> list[int] | None:
    """Which row comes at which place, None if they are in the order of their slots already."""
    if len(rows) == 1:
        return None
    order = sorted(range(len(rows)), key=lambda i: rows[i].slot)
    return None if order == list(range(len(rows))) else order
