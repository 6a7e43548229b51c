"""What recurrent layers (Mamba, gated DeltaNet, short convolutions) make of some tokens, a state after each, and the
interface by which transformers' layers ask for states and leave them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, int, str]
"""Which state of a model: its layer, its number within the layer, "conv" or "recurrent"."""


@dataclass(frozen=True, eq=False)
class Steps:
    """States after each of some tokens, of which the last one alone is kept: the others are made anew when they are needed.

    last: [R, ..]. again: makes the state after so many tokens, [1, ..], from a row's part of each tensor in `of`, [R, ..].
    """

    count: int
    last: Tensor
    again: Callable[[int, tuple[Tensor, ...]], Tensor]
    of: tuple[Tensor, ...]

    def after(self, step: int, row: int) -> Tensor:
        """[1, ..]"""
        if step == self.count - 1:
            return self.last[row : row + 1]
        return self.again(step + 1, tuple(one[row : row + 1] for one in self.of))


States = list[Tensor] | Steps
"""[R, ..] after each token."""


def _tensors_of(states: States) -> list[Tensor]:
    return [states.last, *states.of] if isinstance(states, Steps) else states


@dataclass(eq=False)
class Run:
    """Rows of a pass whose recurrent layers go over the same number of tokens, in steps or at once.

    rows: their numbers in the pass. width: tokens. before: each row's mark at its beginning, None if it is empty.
    states: what each key became by and by, [R, ..] each: after every token, or at the end alone if there are no `steps`.

    whole: whether the layer at work is given all tokens and still leaves the state after each (`recurrent.rules`).
    lent: the recurrent state that it was given, lent_as: its key; made: what it has made of that, a state a token.

    holders: of its rows, those that may hold it long, which took a token alone.
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
    holders: int = 1

    @cached_property
    def share(self) -> float:
        """Bytes of its states for each holder, once it is at its end."""
        tensors = [one for states in self.states.values() for one in _tensors_of(states)]
        return sum(tensor.nbytes for tensor in tensors) / max(self.holders, 1)

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
        return states.after(step, row) if isinstance(states, Steps) else states[step][row : row + 1]


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


class RunStates:
    """What transformers' layers ask a cache for.

    asked: called with the kind whenever a layer asks for a state, by whoever wants to know which (`recurrent.mixers`).
    """

    def __init__(self) -> None:
        self.asked: Callable[[str], None] | None = None
        self.runs: list[Run] = []  # of the pass at hand
        self.run: Run | None = None  # the one that layers work on
        self._empty: dict[Key, Tensor] = {}  # the states of an empty sequence, [1, ..]

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
        if self.run.whole and conv_states.shape[-1] > 1:
            last = inputs[..., -conv_kernel_size:]
            self._note(key, Steps(conv_states.shape[-1], last, partial(_inputs_of, conv_kernel_size), (inputs,)))
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


def _inputs_of(size: int, count: int, of: tuple[Tensor, ...]) -> Tensor:
    """What a convolution of that size keeps after so many tokens. of: its inputs, earlier ones before, [1, channels, ..]."""
    return of[0][..., count : count + size]
