"""Prefix caching: what a text begins with is not read again if another one began alike, be it over by now.

Keys and values of whole blocks of tokens are copied out of the sequences into a tree, in which a block is found by its
tokens and the blocks before it. Tokens are compared as they are: a hash that two texts share would give one of them the
other's keys. A copy takes a hundredth of what reading the tokens does. What was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Many
from threading import get_ident
from typing import Any, Protocol, cast

from torch import Tensor

from outrider.models.base import Sequence

BLOCK = 32  # tokens

Held = list[Tensor]
"""Of a block: each layer's keys and values, and what else is kept of its tokens."""


class KeepsPrefixes(Protocol):
    """An engine whose sequences can go on from what was kept of others. prefix_cache: None, if nothing is kept."""

    prefix_cache: PrefixCache | None

    @property
    def keeps_prefixes(self) -> bool:
        """Whether they can."""

    @property
    def kept_form(self) -> object:
        """What must be equal for what was kept to be of use."""

    def keeps_all_of(self, sequence: Any) -> bool:
        """Whether all that is kept now was kept when the sequence was opened."""

    def note_taken(self, sequence: Any, count: int) -> None:
        """So many of its tokens were read elsewhere."""

    def block_of(self, sequence: Any, start: int) -> Held:
        """A copy of what is kept of the `BLOCK` tokens from position `start` on."""

    def append_blocks(self, sequence: Any, blocks: Many[Held]) -> None:
        """Go on by tokens that were read elsewhere."""


def give_prefix_cache(model: object, limit: int) -> None:
    """Let a model that can keep prefixes do so from now on, `limit` bytes of them, or (0) forget them."""
    if can_keep_prefixes(model):
        keeper = cast(KeepsPrefixes, model)
        before, keeper.prefix_cache = keeper.prefix_cache, PrefixCache(limit) if limit else None
        if before is not None:
            before.clear()


def can_keep_prefixes(model: object) -> bool:
    """Whether it is one of `KeepsPrefixes`."""
    return getattr(model, "keeps_prefixes", False) is True


def prefix_cache_of(model: object) -> PrefixCache | None:
    """Where a model keeps what this thread has read, if it does.

    What another thread reads with it is kept apart: it may do so under autocast, or with a hook or an adapter of its own.
    """
    found: PrefixCache | None = getattr(model, "prefix_cache", None)
    return found if found is not None and found.thread == get_ident() else None


class _Block:
    """One in the tree. of: the blocks that it is one of, by their tokens."""

    def __init__(self, held: Held, of: dict[tuple[int, ...], _Block], tokens: tuple[int, ...]) -> None:
        self.held, self.of, self.tokens = held, of, tokens
        self.after: dict[tuple[int, ...], _Block] = {}
        self.bytes = sum(tensor.nbytes for tensor in held)


class PrefixCache:
    """Of one model, for the thread that makes it, while that has the model's lock. limit: bytes that are kept at most."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self.thread = limit, 0, get_ident()
        self._form: object = None
        self._first: dict[tuple[int, ...], _Block] = {}
        self._used: OrderedDict[_Block, None] = OrderedDict()  # the longest unused first; none before those after it

    def take_up(self, model: KeepsPrefixes, sequence: Sequence, tokens: Many[int]) -> None:
        """Let a sequence that holds a beginning of the tokens go on as far as they are kept."""
        done = sequence.length // BLOCK
        if len(tokens) < (done + 1) * BLOCK:
            return
        found = list(self._path(model, tokens))
        if len(found) > done:
            self._touch(found)
            before = sequence.length
            sequence.truncate(done * BLOCK)
            try:
                model.append_blocks(sequence, [block.held for block in found[done:]])
            except (MemoryError, RuntimeError):
                self.clear()
                sequence.truncate(done * BLOCK)  # it is read instead
                return
            model.note_taken(sequence, sequence.length - before)

    def keep(self, model: KeepsPrefixes, sequence: Sequence, tokens: Many[int]) -> None:
        """Keep what a sequence holds, which begins with these tokens."""
        if not model.keeps_all_of(sequence):
            return
        path = list(self._path(model, tokens[: sequence.length]))
        after = path[-1].after if path else self._roots(model)
        for start in range(len(path) * BLOCK, min(len(tokens), sequence.length) - BLOCK + 1, BLOCK):
            key = tuple(tokens[start : start + BLOCK])
            try:
                held = model.block_of(sequence, start)
            except (MemoryError, RuntimeError):  # there are better uses for what memory is left
                self.clear()
                return
            block = _Block(held, after, key)
            self.bytes += block.bytes
            self._used[block] = None
            after[key] = block  # last: an interrupt leaves nothing to be found that is not known
            path.append(block)
            after = block.after
        self._touch(path)
        while self.bytes > self.limit:
            self._drop()

    def clear(self) -> None:
        """Forget all of it, and give its memory back at once: blocks and what they are found in hold each other."""
        for block in self._used:
            block.held.clear()
            block.after.clear()
        self.bytes, self._first = 0, {}
        self._used.clear()

    def _roots(self, model: KeepsPrefixes) -> dict[tuple[int, ...], _Block]:
        """What texts begin with."""
        form = model.kept_form
        if form != self._form:  # blocks lack what is kept from now on
            self.clear()
            self._form = form
        return self._first

    def _path(self, model: KeepsPrefixes, tokens: Many[int]) -> Iterator[_Block]:
        """The blocks that the tokens begin with."""
        after = self._roots(model)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = after.get(tuple(tokens[start : start + BLOCK]))
            if block is None:
                return
            yield block
            after = block.after

    def _touch(self, path: list[_Block]) -> None:
        for block in reversed(path):
            self._used.move_to_end(block)

    def _drop(self) -> None:
        block, _ = self._used.popitem(last=False)
        block.of.pop(block.tokens, None)
        self.bytes -= block.bytes
