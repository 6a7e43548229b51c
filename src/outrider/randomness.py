"""All randomness of a generation, derived from one seed: a stream of uniforms per batch row.

A row's stream depends on the seed, the row's index and its prompt, never on its neighbours, and every draw, acceptance and
draft takes fresh numbers from it. Numbers are made on the host in float64, a few per round: all devices see the same.

Why on the prompt: the next turn of a conversation holds what the same seed gave before. Numbers that made it would judge
the drafts that are copied from it, and a draft must not depend on the numbers that accept it (docs/proof.md, section 0).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from outrider.errors import ParameterError
from outrider.settings.seed import check_seed

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 64


class RandomStream:
    """Independent uniforms in [0, 1) for one row (Philox, a counter-based generator).

    aims: whether `aim` looks at the laws that it is shown.
    key: of a row whose tokens are decided by the numbers of their positions (`sampling.race`), 0 … 2^63 - 1; None: by what
    the stream gives next.
    """

    aims = False
    key: int | None = None

    def __init__(self, seed: int, row: int = 0, about: Many[int] = (), by_position: bool = False) -> None:
        """about: what else tells this stream from others of the seed, [words of 32 bits]."""
        words = np.random.SeedSequence(check_seed(seed), spawn_key=(row, *about))
        self._generator = np.random.Generator(np.random.Philox(words))
        if by_position:
            self.key = int(words.generate_state(3, np.uint64)[2] >> np.uint64(1))  # Philox has the first two words
        self._held: list[float] = []  # made many at once: beside a model each call of NumPy costs tens of microseconds

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream of random numbers can't be copied: what it gives would be given twice")

    def take(self, count: int) -> list[float]:
        """The next `count` numbers; none is ever given twice."""
        if count > len(self._held):
            self._held += self._generator.random(max(count, _AT_ONCE)).tolist()
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def aim(self, laws: Tensor, row: int, ids: Tensor | None = None) -> float:
        """The number by which a token is drawn from laws[row], [V]: the next one; a replay (`bench.chains`) chooses it.

        ids: see `sampling.draw.draw_each`.
        """
        del laws, row, ids
        return self.take(1)[0]


def derived_seed(seed: int, *about: int) -> int:
    """Another seed, that of `seed` and these numbers of 0 or more."""
    return int(np.random.SeedSequence(check_seed(seed), spawn_key=about).generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream_after(
    seed: int,
    row: int,
    prompt: Many[int],
    source: Many[int] | Tensor | None = None,
    occasion: Many[int] = (),
    by_position: bool = False,
) -> RandomStream:
    """The stream for what follows a prompt (token ids).

    source: what an encoder has read. occasion: of a drafter that knows earlier texts, remembered or counted, which may have
    been made by the same seed after the same prompt (`Drafter.occasion`); without effect `by_position`, where nothing that
    a drafter knows can bend the law.
    """
    occasion = () if by_position else occasion
    digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=16)
    digest.update(repr((len(prompt), *map(int, occasion))).encode())
    if source is not None:
        values = source.detach().double().cpu().numpy() if isinstance(source, torch.Tensor) else np.asarray(source, np.int64)
        digest.update(values.tobytes())
    return RandomStream(seed, row, np.frombuffer(digest.digest(), dtype="<u4").tolist(), by_position)


def keys_of(streams: Many[RandomStream]) -> list[int] | None:
    """Of rows that are decided by position, as all of a batch are; None for others."""
    keys = [stream.key for stream in streams]
    known = [key for key in keys if key is not None]
    if len(known) not in (0, len(keys)):
        raise ParameterError("requests must all be decided by position or none, got some of each: give them to two decoders")
    return known or None
