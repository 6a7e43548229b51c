"""Hidden states of the tokens that the paged cache holds, in the same blocks."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

States = NDArray[np.float32]


class KeptStates:
    """By layer, a state for each place in the cache: block · `block` + offset. Layers as `keep_states` counts them."""

    def __init__(self, block: int, width: int) -> None:
        self._block, self._width, self._count = block, width, 0
        self._held: dict[int, States] = {}

    @property
    def layers(self) -> list[int]:
        """Whose states are kept."""
        return list(self._held)

    def add(self, layers: Many[int]) -> list[int]:
        """Keep those of further layers, too. → those that are new"""
        fresh = [layer for layer in layers if layer not in self._held]
        for layer in fresh:
            self._held[layer] = self._empty()
        return fresh

    def drop(self, layers: Many[int]) -> None:
        """Keep those of these no longer."""
        for layer in layers:
            del self._held[layer]

    def has(self, layers: Many[int]) -> bool:
        """Whether the states of all these are kept."""
        return all(layer in self._held for layer in layers)

    def grow(self, count: int) -> None:
        """Room for that many blocks."""
        self._count = count
        for layer, old in self._held.items():
            if len(old) < count * self._block:
                self._held[layer] = self._empty()
                self._held[layer][: len(old)] = old

    def put(self, layer: int, states: Any, places: NDArray[np.int64]) -> None:
        """[N, W] at N places."""
        self._held[layer][places] = states

    def copy(self, source: int, target: int) -> None:
        """A block's states to another block."""
        for held in self._held.values():
            held[target * self._block : (target + 1) * self._block] = held[source * self._block : (source + 1) * self._block]

    def at(self, layers: Many[int], places: NDArray[np.int64]) -> Tensor:
        """Those of some layers side by side. → [N, layers · W]"""
        return torch.from_numpy(np.concatenate([self._held[layer][places] for layer in layers], axis=-1))

    def _empty(self) -> States:
        return np.zeros((self._count * self._block, self._width), np.float32)
