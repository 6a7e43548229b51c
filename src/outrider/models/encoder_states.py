"""What an encoder has made of the sources that it has read, so that nobody has to run it again.

Of those that open sequences read; of those that somebody else has read with it (`generate`, in the drop-in); and, for a
draft with the target's own encoder, of those that the target has read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EncoderStates:
    """States [1, S, W] by a source's key, `source_key`."""

    def __init__(self) -> None:
        self._own: dict[bytes, Tensor] = {}
        self._given: list[dict[bytes, Tensor]] = []
        self._lender: weakref.ref[EncoderStates] | None = None  # a draft does not keep a target

    def __len__(self) -> int:
        return len(self._own) + sum(map(len, self._given))

    def known(self, key: bytes) -> Tensor | None:
        """What has been made of a source, if it is known."""
        found = self._here(key)
        lender = None if self._lender is None else self._lender()
        return lender._here(key) if found is None and lender is not None else found  # no further: two may lend each other

    def _here(self, key: bytes) -> Tensor | None:
        return next((held[key] for held in (*reversed(self._given), self._own) if key in held), None)

    def keep(self, key: bytes, states: Tensor) -> None:
        """As long as an open sequence has read the source."""
        self._own[key] = states

    def drop(self, key: bytes) -> None:
        """None has any more."""
        self._own.pop(key, None)

    def borrow(self, lender: EncoderStates | None) -> None:
        """From now on look there, too."""
        self._lender = None if lender is None else weakref.ref(lender)

    @contextmanager
    def given(self, known: Iterable[tuple[bytes, Tensor]]) -> Iterator[None]:
        """Until it ends, these are known as well."""
        block = dict(known)
        self._given.append(block)
        try:
            yield
        finally:
            self._given = [held for held in self._given if held is not block]


def source_key(inputs: dict[str, Tensor]) -> bytes:
    """What tells an encoder's input from others: its own bits."""
    return next(iter(inputs.values())).cpu().contiguous().view(torch.uint8).numpy().tobytes()


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same parameters and buffers, by name, shape and value."""
    mine, theirs = one.state_dict(), other.state_dict()
    if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
        return False
    return all(torch.equal(mine[name], theirs[name]) for name in mine)
