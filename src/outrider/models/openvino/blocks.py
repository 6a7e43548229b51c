"""Which blocks of the cache hold which tokens: handed out, shared between sequences that begin alike, taken back.

A full block is known by its tokens and the block before it. Sequences whose prompts begin alike name the same blocks; a
block that no sequence names is kept, with what it holds, until its place is needed (the longest unused first). Only blocks
filled while a prompt is read are offered for sharing: what speculation writes may be taken back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many

Key = tuple[int | None, tuple[int, ...]]


class Blocks:
    """Blocks 0 … count - 1 of `size` tokens each. Pure bookkeeping: the tensors are the engine's."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._users: dict[int, int] = {}
        self._known: dict[Key, int] = {}  # full blocks by what they hold
        self._keys: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known blocks that no sequence names, oldest first

    @property
    def available(self) -> int:
        """Blocks that could be taken."""
        return len(self._free) + len(self._idle)

    def grow(self, count: int) -> None:
        """More blocks, after the tensors have grown."""
        self._free = list(range(count - 1, self.count - 1, -1)) + self._free
        self.count = count

    def take(self) -> int:
        """A block for one sequence. Raises IndexError if there is none: `grow` first."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no block is left")
        self._users[block] = 1
        return block

    def give(self, block: int) -> None:
        """One sequence less names the block."""
        self._users[block] -= 1
        if self._users[block]:
            return
        del self._users[block]
        if block in self._keys:
            self._idle[block] = None
        else:
            self._free.append(block)

    def find(self, before: int | None, tokens: Many[int]) -> int | None:
        """The block that holds these `size` tokens after the block `before`, now named by one sequence more; or None."""
        block = self._known.get((before, tuple(tokens)))
        if block is not None:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        return block

    def publish(self, block: int, before: int | None, tokens: Many[int]) -> None:
        """From now on the full block can be found by what it holds, unless an equal one can."""
        key = (before, tuple(tokens))
        if block not in self._keys and key not in self._known and (before is None or before in self._keys):
            self._known[key] = block
            self._keys[block] = key

    def retract(self, block: int) -> bool:
        """Before a full block is written again: it can't be found any more. False if another sequence names it, too."""
        if self._users[block] > 1:
            return False
        if block in self._keys:
            self._forget(block)
        return True

    def forget(self) -> None:
        """No block is to be found by what it holds any more: something is kept from now on that they do not have."""
        for block in list(self._keys):
            if block in self._keys:
                self._forget(block)

    def _forget(self, block: int) -> None:
        """The block is about to hold something else; blocks that follow it must not be found behind it any more."""
        lost = [block]
        while lost:
            gone = lost.pop()
            key = self._keys.pop(gone, None)
            if key is not None:
                del self._known[key]
            lost += [other for other, (before, _) in self._keys.items() if before == gone]
            if gone in self._idle:
                del self._idle[gone]
                self._free.append(gone)
