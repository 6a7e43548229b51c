"""A slot cache for models some of whose layers keep a state instead of keys and values (Mamba, gated DeltaNet, short
convolutions): states are kept after each of a sequence's last tokens, so that it can be rolled back there.

A state can't be cut as keys can; it can be kept as it was. A pass makes new states and leaves the old ones as they are, so a
kept state is a reference, copying a sequence copies references, and what a pass that failed has made is dropped. What is
known of a sequence at a position is a *mark*. Where a roll-back finds none, what is missing is scored once more, from the
last one before it (`recurrent.model`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from outrider.models.cache.slot_cache import SlotCache

Key = tuple[int, int, str]
"""Which state of a model: its layer, its number within the layer, "conv" or "recurrent"."""

STEPS = 32  # tokens of a row that are at most taken one by one: as many as are ever verified at once, and some more
KEPT_BYTES = 2**29  # of states that a model keeps for roll-backs beyond the last pass, all sequences together


@dataclass(frozen=True, eq=False)
class Steps:
    """States after each of some tokens, of which the last one alone is kept: the others are made anew when they are needed.

    again: (row, number of tokens) → the state after so many of a row's tokens, [1, ..].
    """

    count: int
    last: Tensor
    again: Callable[[int, int], Tensor]

    def of(self, step: int, row: int) -> Tensor:
        """[1, ..]"""
        return self.last[row : row + 1] if step == self.count - 1 else self.again(row, step + 1)


States = list[Tensor] | Steps
"""[R, ..] after each token."""


@dataclass(eq=False)
class Run:
    """Rows of a pass whose recurrent layers go over the same number of tokens, in steps or at once.

    rows: their numbers in the pass. width: tokens. before: each row's mark at its beginning, None if it is empty.
    states: what each key became by and by, [R, ..] each: after every token, or at the end alone if there are no `steps`.

    whole: whether the layer at work is given all tokens and still leaves the state after each (`recurrent.rules`).
    lent: the recurrent state that it was given, lent_as: its key; made: what it has made of that, a state a token.
    """

    rows: tuple[int, ...]
    width: int
    steps: bool
    before: tuple[Mark | None, ...]
    states: dict[Key, States] = field(default_factory=dict)
    now: dict[Key, Tensor] = field(default_factory=dict)  # of the step at hand, as far as it has come
    whole: bool = False
    lent: Tensor | None = None
    lent_as: Key | None = None
    made: States | None = None

    def leave(self, states: States) -> None:
        """Keep what became of the recurrent state that was lent, after each token."""
        assert self.lent_as is not None
        self.states[self.lent_as] = states

    def end_step(self) -> None:
        """Keep what the step at hand has left."""
        for key, state in self.now.items():
            steps = self.states.setdefault(key, [])
            assert isinstance(steps, list)
            steps.append(state)
        self.now.clear()

    def state(self, key: Key, step: int, row: int) -> Tensor:
        """A row's state after a step, [1, ..]."""
        states = self.states[key]
        return states.of(step, row) if isinstance(states, Steps) else states[step][row : row + 1]


@dataclass(frozen=True, eq=False)
class Mark:
    """What is known of a sequence after one of its tokens: the states of a run's row after a step."""

    run: Run
    step: int
    row: int

    def of(self, key: Key) -> Tensor:
        """[1, ..]"""
        return self.run.state(key, self.step, self.row)

    def alone(self) -> Mark:
        """The same without what else its run holds."""
        if len(self.run.rows) == 1 and all(isinstance(one, list) and len(one) == 1 for one in self.run.states.values()):
            return self
        mine = Run((0,), 1, True, ())
        mine.states = {key: [self.of(key).clone()] for key in self.run.states}
        return Mark(mine, 0, 0)


class RecurrentCache(SlotCache):
    """asked: called with the kind whenever a layer asks for a state, by whoever wants to know which (`recurrent.mixers`).

    steps: more tokens of a row than these are gone over at once, and leave the last state alone.
    """

    def __init__(self, num_layers: int, kept_dtype: torch.dtype | None = None) -> None:
        super().__init__(num_layers, kept_dtype)
        self.asked: Callable[[str], None] | None = None
        self.steps = STEPS
        self.goes_on = True  # whether layers go on from a state over many tokens at once
        self.runs: list[Run] = []  # of the pass at hand
        self.run: Run | None = None  # the one that layers work on
        self._empty: dict[Key, Tensor] = {}  # the states of an empty sequence, [1, ..]
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
        older = sorted(position for position in kept if position < start)
        each = sum(state.nbytes for state in self._empty.values()) * len(self._marks)
        room = 0 if all_older else KEPT_BYTES // max(each, 1)
        for position in older[: max(0, len(older) - room)]:
            mark = kept[position]
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

    # What transformers' layers ask for.

    def is_recording_past(self, layer_idx: int) -> bool:
        """Yes: so most layers hand over what they convolve, instead of changing the state that they were given."""
        del layer_idx
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, [R, channels, columns]; the caller may change them (Kimi does)."""
        return self._lent((layer_idx, state_idx, "conv"))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[R, ..]; the caller may change it (Mamba does)."""
        return self._lent((layer_idx, state_idx, "recurrent"))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Note new inputs, [R, channels, N]. → the earlier ones and these"""
        del kwargs
        if conv_kernel_size is None:
            raise ValueError("its convolutions do not say how many inputs they need")
        assert self.run is not None
        key = (layer_idx, state_idx, "conv")
        before = self._state(key)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        inputs = torch.cat([before, conv_states], dim=-1)
        if self.run.whole:
            ends = range(inputs.shape[-1] - conv_states.shape[-1] + 1, inputs.shape[-1] + 1)
            self._note(key, [inputs[..., end - conv_kernel_size : end] for end in ends])
        else:
            self._note(key, [inputs[..., -conv_kernel_size:].clone()])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Note the state after the tokens at hand, [R, ..]."""
        del kwargs
        assert self.run is not None
        if self.run.whole:
            assert self.run.made is not None
            self._note((layer_idx, state_idx, "recurrent"), self.run.made)
            self.run.made = None
        else:
            self._note((layer_idx, state_idx, "recurrent"), [recurrent_states])
        return recurrent_states

    def _lent(self, key: Key) -> Tensor | None:
        """A copy of a state, which is what it will have become unless another is noted."""
        state, run = self._state(key), self.run
        if state is None:
            return None
        assert run is not None
        if run.whole:
            if key[2] == "recurrent":
                run.lent, run.lent_as = state, key
            return state
        mine = run.now[key] = state.clone()
        return mine

    def _note(self, key: Key, states: States) -> None:
        run = self.run
        assert run is not None
        last = states.last if isinstance(states, Steps) else states[-1]
        if key not in self._empty:
            self._empty[key] = torch.zeros_like(last[:1])
        if run.whole:
            run.states[key] = states
        else:
            run.now[key] = last

    def _state(self, key: Key) -> Tensor | None:
        """What a run begins its next step with, [R, ..]; None if nothing is known of that state yet."""
        if self.asked is not None:
            self.asked(key[2])
        run = self.run
        assert run is not None
        made = run.states.get(key)
        if made is not None:
            return made.last if isinstance(made, Steps) else made[-1]
        empty = self._empty.get(key)
        if empty is None:
            return None
        rows = [empty if mark is None else mark.of(key) for mark in run.before]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

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

    def clear(self, slot: int) -> None:
        """See `SlotCache`."""
        super().clear(slot)
        self.forget(slot)

    def move(self, source: int, target: int, length: int, start: int = 0) -> None:
        """See `SlotCache`."""
        super().move(source, target, length, start)
        kept = {position: mark for position, mark in self._marks.get(source, {}).items() if position <= length}
        self._marks[target] = kept
        self._floor[target] = min(self._floor.get(source, 0), length)
