"""A pass of a model with recurrent layers as a graph: the states before it are inputs, what it leaves are outputs.

What it leaves of a state is a tensor, or, of several tokens, the last state and what those in between are made of (`Steps`).
How each is made again does not depend on the pass, so it is read off an ordinary one (`Layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from outrider.models.cache.runs import Key, Run, RunStates, States, Steps
from outrider.models.passes.tracing import TracedRows


@dataclass(frozen=True)
class _Left:
    """Of a state: the tensors that are left, and how states in between are made of them; None: there are none."""

    tensors: int
    again: Callable[[int, tuple[Tensor, ...]], Tensor] | None


class Layout:
    """What passes leave of each state, in order."""

    def __init__(self, left: Mapping[Key, States]) -> None:
        self._left = {
            key: _Left(1 + len(states.of), states.again) if isinstance(states, Steps) else _Left(1, None)
            for key, states in left.items()
        }

    def __str__(self) -> str:
        return str({key: (left.tensors, left.again is None) for key, left in self._left.items()})

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of which states."""
        return tuple(self._left)

    def tensors(self, left: Mapping[Key, States]) -> list[Tensor]:
        """What a pass has left."""
        found: list[Tensor] = []
        for key in self._left:
            states = left[key]
            found += [states.last, *states.of] if isinstance(states, Steps) else states[-1:]
        return found

    def states(self, tensors: Iterable[Tensor], count: int) -> dict[Key, States]:
        """The same of so many tokens, from these. Raises `ValueError` if these are not as many."""
        rest = iter(tensors)
        made: dict[Key, States] = {}
        for key, left in self._left.items():
            found = tuple(islice(rest, left.tensors))
            if len(found) < left.tensors:
                break
            made[key] = [found[0]] if left.again is None else Steps(count, found[0], left.again, found[1:])
        if len(made) < len(self._left) or next(rest, None) is not None:
            raise ValueError("a recorded pass leaves other states than its model's layers")
        return made


class TracedStates(RunStates, Cache):  # type: ignore[misc]
    """The cache of a pass that is traced.

    keyed: keys and values of the layers that have some, by number; the others only have the states given.
    """

    def __init__(self, num_layers: int, keyed: Mapping[int, TracedRows], states: Mapping[Key, Tensor], width: Any) -> None:
        RunStates.__init__(self)
        Cache.__init__(self, layers=[keyed.get(i, _NoKeys()) for i in range(num_layers)])
        self._empty = dict(states)
        self.run = Run((0,), width, steps=True, before=(), states={key: [state] for key, state in states.items()})
        self.runs = [self.run]


class _NoKeys(TracedRows):
    """Of a layer that asks for none."""

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self._columns = 0
