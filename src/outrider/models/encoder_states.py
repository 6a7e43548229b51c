"""What an encoder has made of the sources that it has read, so that nobody has to run it again.

Of those that open sequences read; of those that somebody else has read with it (`generate`, in the drop-in); and, for a
draft with the target's own encoder, of those that the target has read. Weights may change between generations, while some
stream is still open: what is kept holds for the weights that made it (`stamp`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

Stamp = tuple[tuple[int, int], ...]


class EncoderStates:
    """States [1, S, W] by a source's key, `source_key`. stamp: of the encoder's weights now, `stamp`."""

    def __init__(self, stamp: Callable[[], Stamp]) -> None:
        self._stamp = stamp
        self._own: dict[bytes, tuple[Stamp, Tensor]] = {}
        self._given: list[dict[bytes, Tensor]] = []
        # Weakly, a draft does not keep a target; with both encoders as they were when they were found to be the same.
        self._lender: tuple[weakref.ref[EncoderStates], Stamp, Stamp] | None = None

    def __len__(self) -> int:
        return len(self._own) + sum(map(len, self._given))

    def known(self, key: bytes) -> Tensor | None:
        """What has been made of a source, if it is known."""
        found = self._here(key)
        lender = None if found is not None else self._still_the_same()
        return found if lender is None else lender._here(key)  # no further: two may lend each other

    def _here(self, key: bytes) -> Tensor | None:
        for given in reversed(self._given):
            if key in given:
                return given[key]
        stamp, states = self._own.get(key, (None, None))
        return states if states is not None and stamp == self._stamp() else None

    def _still_the_same(self) -> EncoderStates | None:
        """Who lends, if neither's weights have changed since."""
        if self._lender is None:
            return None
        lender, *stamps = self._lender
        found = lender()
        return found if found is not None and [self._stamp(), found._stamp()] == stamps else None

    def keep(self, key: bytes, states: Tensor) -> None:
        """As long as an open sequence has read the source."""
        self._own[key] = self._stamp(), states

    def drop(self, key: bytes) -> None:
        """None has any more."""
        self._own.pop(key, None)

    def borrow(self, lender: EncoderStates | None) -> None:
        """From now on look there, too, as long as both have the weights that they have now."""
        self._lender = None if lender is None else (weakref.ref(lender), self._stamp(), lender._stamp())

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


def stamp(module: nn.Module) -> Stamp:
    """What changes with the values of a module's weights: where they lie, and how often they were written to."""
    return tuple((tensor.data_ptr(), _writes(tensor)) for tensor in chain(module.parameters(), module.buffers()))


def _writes(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, where nobody counts
        return 0


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same parameters and buffers, by name, shape and value."""
    mine, theirs = one.state_dict(), other.state_dict()
    if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
        return False
    return all(torch.equal(mine[name], theirs[name]) for name in mine)
