"""Reading prompts in chunks, so that memory stays bounded whatever their length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import cast

from outrider.models.base import LanguageModel, Sequence
from outrider.models.cache.prefix_cache import BLOCK, KeepsPrefixes, PrefixCache, can_keep_prefixes, prefix_cache_of
from outrider.support.device_data import pad_rows

CHUNK = 512
_Reading = tuple[Sequence, Many[int]]


def prefill(
    model: LanguageModel,
    sequences: Many[Sequence],
    prompts: Many[Many[int]],
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Score the prompts into their sequences, no logits kept, at most `CHUNK` tokens of each row at a time.

    What they begin with is taken from the model's prefix cache, if it has one, and what is read goes there; without one,
    what several of them begin with is read once all the same. Stops between chunks once `cancelled()` is true.
    """
    cache = prefix_cache_of(model)
    shared = _shared(prompts) if cache is None and can_keep_prefixes(model) else []
    if not any(shared):
        _read(cache, model, sequences, prompts, cancelled)
        return
    cache = PrefixCache(sys.maxsize)
    try:
        _read(cache, model, sequences, prompts, cancelled, shared)
    finally:
        cache.clear()


def _read(
    cache: PrefixCache | None,
    model: LanguageModel,
    sequences: Many[Sequence],
    prompts: Many[Many[int]],
    cancelled: Callable[[], bool],
    shared: Many[int] = (),
) -> None:
    """shared: how many tokens of each are worth keeping, all if it is empty."""
    worth = dict(zip(map(id, sequences), shared, strict=bool(shared)))
    while not cancelled():
        _take_up(cache, model, sequences, prompts)
        rows = [pair for pair in zip(sequences, prompts, strict=True) if pair[0].length < len(pair[1])]
        if not rows:
            return
        if cache is not None:
            rows = _without_those_that_wait(rows)
        tokens, lengths = pad_rows([prompt[row.length : row.length + CHUNK] for row, prompt in rows], model.device)
        model.score([row for row, _ in rows], tokens, lengths, "none")
        for row, prompt in rows:
            _keep(cache, model, row, prompt[: worth.get(id(row))])


def go_on_by_known(model: LanguageModel, sequences: Many[Sequence], prompts: Many[Many[int]]) -> None:
    """Let sequences go on as far as the model's prefix cache knows their prompts."""
    _take_up(prefix_cache_of(model), model, sequences, prompts)


def keep(model: LanguageModel, sequence: Sequence, tokens: Many[int]) -> None:
    """Let others that begin with these tokens, which the sequence holds, go on from there."""
    _keep(prefix_cache_of(model), model, sequence, tokens)


def _take_up(cache: PrefixCache | None, model: LanguageModel, sequences: Many[Sequence], prompts: Many[Many[int]]) -> None:
    if cache is not None:
        for sequence, prompt in zip(sequences, prompts, strict=True):
            cache.take_up(cast(KeepsPrefixes, model), sequence, prompt)


def _keep(cache: PrefixCache | None, model: LanguageModel, sequence: Sequence, tokens: Many[int]) -> None:
    if cache is not None:
        cache.keep(cast(KeepsPrefixes, model), sequence, tokens)


def _shared(prompts: Many[Many[int]]) -> list[int]:
    """How many tokens of each are what another one begins with, 0 if that is not a block."""
    found = [0] * len(prompts)
    if len({tuple(prompt[:BLOCK]) for prompt in prompts}) == len(prompts):
        return found
    order = sorted(range(len(prompts)), key=lambda i: list(prompts[i]))
    for one, other in pairwise(order):
        alike = _alike(prompts[one], prompts[other])
        for i in (one, other) if alike >= BLOCK else ():
            found[i] = max(found[i], alike)
    return found


def _alike(one: Many[int], other: Many[int]) -> int:
    """How many tokens both begin with."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _without_those_that_wait(rows: list[_Reading]) -> list[_Reading]:
    """Without those that begin as another one does of which the next block is read now: they will go on from it."""
    begun: set[tuple[int, ...]] = set()
    going = []
    for row, prompt in rows:
        end = (row.length // BLOCK + 1) * BLOCK
        block = tuple(prompt[:end])
        if len(block) < end or block not in begun:
            going.append((row, prompt))
            begun.add(block)
    return going
