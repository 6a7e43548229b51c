"""A slot cache for models some of whose layers keep a state instead of keys and values (Mamba, gated DeltaNet, short
convolutions): states are kept after each of a sequence's last tokens, so that it can be rolled back there.

A state can't be cut as keys can; it can be kept as it was. A pass makes new states and leaves the old ones as they are, so a
kept state is a reference, copying a sequence copies references, and what a pass that failed has made is dropped. What is
known of a sequence at a position is a *mark*. Where a roll-back finds none, what is missing is scored once more, from the
last one before it (`recurrent.model`).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Self

import torch
from torch import Tensor

from outrider.models.cache.runs import Key, Mark, Run, RunStates, States
from outrider.models.cache.slot_cache import SlotCache

STEPS = 32  # tokens of a row that are at most taken one by one: as many as are ever verified at once, and some more
KEPT_BYTES = 2**29  # of states that a model keeps for roll-backs beyond the last pass, all sequences together


class RecurrentCache(RunStates, SlotCache):
    """steps: more tokens of a row than these are gone over at once, and leave the last state alone."""

    def __init__(self, num_layers: int, kept_dtype: torch.dtype | None = None) -> None:
        RunStates.__init__(self)
        SlotCache.__init__(self, num_layers, kept_dtype)
        self.steps = STEPS
        self.goes_on = True  # whether layers go on from a state over many tokens at once
        self._marks: dict[int, dict[int, Mark | None]] = {}  # by slot and position; None: as of an empty sequence
        self._floor: dict[int, int] = {}  # by slot: where it was last rolled back to, or a prompt was read to

    # What a pass does.

    def begin(self, slots: Many[int], starts: Many[int], counts: Many[int], reading: bool = False) -> None:
        """Before a pass of so many tokens of each row, from states that are there (`rewind`).

        reading: whether they are read as prompts are, by the formulas for many tokens from the first one on.
        """
        many = [count > (1 if reading and start == 0 else self.steps) for start, count in zip(starts, counts, strict=True)]
        at_once = [much and (start == 0 or self.goes_on) for start, much in zip(starts, many, strict=True)]
        stepped = tuple(i for i, all_ in enumerate(at_once) if not all_)
        before = [self._marks[slot][start] if start else None for slot, start in zip(slots, starts, strict=True)]
        self.runs = []
        if stepped:
            width = max(counts[i] for i in stepped)
            self.runs.append(Run(stepped, width, True, tuple(before[i] for i in stepped)))
        self.runs += [Run((i,), counts[i], False, (before[i],)) for i, all_ in enumerate(at_once) if all_]
        self.run = self.runs[0]

    def commit(self, slots: Many[int], starts: Many[int], counts: Many[int]) -> None:
        """After a pass: keep its states."""
        for run in self.runs:
            run.end_step()  # of layers that were given the only step there was
            run.before = ()  # or each pass would hold the one before it
            run.holders = sum(counts[i] == 1 for i in run.rows)
            for row, i in enumerate(run.rows):
                slot, start, count = slots[i], starts[i], counts[i]
                kept = self._marks.setdefault(slot, {})
                if run.steps:
                    for step in range(count):
                        kept[start + step + 1] = Mark(run, step, row)
                else:
                    kept[start + count] = Mark(run, 0, row)
                    self._floor[slot] = start + count
                self._forget_some(slot, start, all_older=count > 1)
        self.runs, self.run = [], None

    def _forget_some(self, slot: int, start: int, all_older: bool) -> None:
        """Forget what is older than the last pass; after one token, which may be one of a draft, what there is no room for,
        the floor apart.
        """
        kept = self._marks[slot]
        room = 0.0 if all_older else KEPT_BYTES / len(self._marks)
        counted: Run | None = None
        for position in sorted((position for position in kept if position < start), reverse=True):
            mark = kept[position]
            if mark is not None and mark.run is not counted and not all_older:
                counted = mark.run
                room -= counted.share
            if room >= 0 and not all_older:
                continue
            if position != self._floor.get(slot) or all_older:
                del kept[position]
            elif mark is not None:
                kept[position] = mark.alone()

    def forget(self, slot: int) -> None:
        """Nobody is in that slot."""
        self._marks.pop(slot, None)
        self._floor.pop(slot, None)

    def rewind(self, slot: int, length: int) -> int:
        """Forget what is known of a slot beyond a length. → the last position there, up to it, of which states are known"""
        kept = self._marks.get(slot, {})
        beyond = [position for position in kept if position > length]
        for position in beyond:
            del kept[position]
        known = max(kept, default=0)
        if beyond and known:
            self._floor[slot] = known
        return known

    def pretend(self, slot: int, length: int) -> None:
        """Take a sequence for one that long, whatever it holds: to measure what a pass costs then."""
        self._marks.setdefault(slot, {})[length] = None

    # What recorded passes are given and leave.

    def given(self, keys: Many[Key]) -> list[Tensor] | None:
        """What the run at hand begins with, [R, ..] each; None where it is of another type than is usual."""
        found = [self._state(key) for key in keys]
        usual = all(
            state is not None and state.dtype is self._empty[key].dtype for key, state in zip(keys, found, strict=True)
        )
        return found if usual else None  # type: ignore[return-value]

    def empty(self, key: Key) -> Tensor:
        """The state of an empty sequence, [1, ..]."""
        return self._empty[key]

    def left(self, slot: int, position: int) -> Mapping[Key, States]:
        """What the pass has left that scored the token before that position."""
        mark = self._marks[slot][position]
        assert mark is not None
        return mark.run.states

    # What becomes of slots.

    def like(self) -> Self:
        """See `SlotCache`."""
        twin = super().like()
        twin._empty = dict(self._empty)
        return twin

    def drop(self) -> None:
        """See `SlotCache`."""
        super().drop()
        self._marks.clear()
        self._floor.clear()

    def clear(self, slot: int, start: int = 0) -> None:
        """See `SlotCache`."""
        super().clear(slot, start)
        if not start:
            self.forget(slot)

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """See `SlotCache`."""
        super().move(source, target, length, start)
        kept = {position: mark for position, mark in self._marks.get(source, {}).items() if position <= length}
        self._marks[target] = kept
        self._floor[target] = min(self._floor.get(source, 0), length)
