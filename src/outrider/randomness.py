"""All randomness of a generation, derived from one seed: a stream of uniforms per batch row.

A row's stream depends on the seed and the row's index only, never on its neighbours, and every draw, acceptance and draft
takes fresh numbers from it. Numbers are made on the host in float64 (a few per round), so that all devices see the same.
"""

from __future__ import annotations

import secrets
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import ParameterError

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEED = 2**63 - 1
_AT_ONCE = 64


def check_seed(seed: object) -> int:
    """The seed itself, or a fresh one for None."""
    if seed is None:
        return secrets.randbelow(2**32)
    number = -1 if isinstance(seed, bool) or not isinstance(seed, Integral) else int(seed)  # NumPy's as well
    if not 0 <= number <= MAX_SEED:
        raise ParameterError(f"seed must be a whole number in 0 … 2^63 - 1, got {seed!r}: leave it out for a random one")
    return number


class RandomStream:
    """Independent uniforms in [0, 1) for one row (Philox, a counter-based generator).

    aims: whether `aim` looks at the laws that it is shown.
    """

    aims = False

    def __init__(self, seed: int, row: int = 0) -> None:
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(check_seed(seed), spawn_key=(row,))))
        self._held: list[float] = []  # made many at once: beside a model each call of NumPy costs tens of microseconds

    def take(self, count: int) -> list[float]:
        """The next `count` numbers; none is ever given twice."""
        if count > len(self._held):
            self._held += self._generator.random(max(count, _AT_ONCE)).tolist()
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def aim(self, laws: Tensor, row: int, ids: Tensor | None = None) -> float:
        """The number by which a token is drawn from laws[row], [V]: the next one; a replay (`bench.chains`) chooses it.

        ids: see `sampling.draw_each`.
        """
        del laws, row, ids
        return self.take(1)[0]
