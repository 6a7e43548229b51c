"""What a pass costs: measured seconds to score n new tokens. Neither flat nor monotone in n, and growing with the context.

Measured once per model and machine and kept on disk, not measured anew in each run: the adaptive draft length
follows from these numbers, so they must be the same for the same seed to give the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Protocol, runtime_checkable

import torch

from outrider.errors import CacheFolderError
from outrider.models.base import LanguageModel
from outrider.models.cache_folder import cache_folder
from outrider.pass_timer import PassTimer, can_pretend

SIZES = (1, 2, 4, 6, 8, 12, 17)
BATCH_SIZES = (1, 2, 3, 5, 9)  # of each of several rows: fewer, since the passes are wide
LONG_SIZES = (1, 2, 4, 8, 17)
CONTEXT = 64
LONG_CONTEXT = 2048
REPEATS = 5
ATTEMPTS = 3
UNSETTLED = 1.4  # median / least of the same pass: beyond this something else is using the machine
REFUTED = 2.0  # rounds that take this many times as long or as short as the table says: it was measured at a bad moment
WORTH_REVIEWING = 0.003  # seconds a pass: below that, Python's own time is a large share
ENOUGH_ROUNDS = 8
PADDING_GAIN = 0.97  # pad only for a gain of 3 % and more
_log = logging.getLogger(__name__)
_measured: dict[str, Costs] = {}


@runtime_checkable
class PadsWidths(Protocol):
    """An engine whose kernels like some widths better than others."""

    def pad_widths(self, width: Callable[[int, int], int]) -> None: ...


@dataclass(frozen=True)
class Costs:
    """What a pass of a model takes.

    verify_seconds: {new tokens in the pass: seconds} after `context` tokens, 1 included. per_token: {new tokens: further
    seconds for each further token of context}. padded: passes are scored at a wider width where that is quicker.
    """

    verify_seconds: Mapping[int, float]
    per_token: Mapping[int, float] = field(default_factory=dict)
    context: int = CONTEXT
    padded: bool = False

    def verify(self, tokens: int, context: int | None = None) -> float:
        """Seconds to score that many tokens after a context, linear between the measured sizes and beyond them."""
        context = self.context if context is None else context
        if self.padded:
            tokens = self.width(tokens, context)
        extra = _between(self.per_token, tokens) * max(0, context - self.context) if self.per_token else 0.0
        return max(_between(self.verify_seconds, tokens) + extra, 1e-9)

    def width(self, tokens: int, context: int) -> int:
        """The measured width of that many tokens or more at which a pass is quickest; itself if none gains."""
        bare = self if not self.padded else Costs(self.verify_seconds, self.per_token, self.context)
        wider = [size for size in self.verify_seconds if size > tokens]
        if not wider:
            return tokens
        best = min(wider, key=lambda size: (bare.verify(size, context), size))
        return best if bare.verify(best, context) < PADDING_GAIN * bare.verify(tokens, context) else tokens


def _between(table: Mapping[int, float], size: int) -> float:
    """The value at a size, linear between those given and beyond them."""
    if size in table:
        return table[size]
    sizes = sorted(table)
    if len(sizes) == 1:
        return table[sizes[0]]
    at = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return table[low] + (table[high] - table[low]) / (high - low) * (size - low)


@dataclass
class CostBook:
    """Tables that hold for a whole run, wherever its parts are computed: those given, and those measured for want of one.

    rows: of each pass that is measured; a table's sizes are tokens of each row. tables: by model, not by machine.
    """

    rows: int = 1
    tables: dict[str, Costs] = field(default_factory=dict)

    def of(self, model: LanguageModel) -> Costs:
        """The model's table."""
        name = self.name_of(model)
        if name not in self.tables:
            self.tables[name] = _held_or_measured(model, self.rows)
        return self.tables[name]

    @staticmethod
    def name_of(model: LanguageModel) -> str:
        """What a table is found by: the model, and what its weights were rounded to."""
        return f"{model.name} {getattr(model, 'dtype_name', '')}".strip()

    def to_dict(self) -> dict[str, dict[str, object]]:
        """For JSON; `from_dict` reads it back."""
        return {
            name: {"seconds": dict(one.verify_seconds), "per_token": dict(one.per_token), "context": one.context}
            for name, one in self.tables.items()
        }

    @classmethod
    def from_dict(cls, rows: int, held: Mapping[str, Mapping[str, Any]]) -> CostBook:
        """What `to_dict` gave."""
        return cls(rows, {name: _from_dict(one) for name, one in held.items()})


_books: list[CostBook] = []


@contextmanager
def costs_by(book: CostBook) -> Iterator[CostBook]:
    """Let `measured_costs` answer from this book meanwhile."""
    _books.append(book)
    try:
        yield book
    finally:
        _books.remove(book)


def measured_costs(model: LanguageModel) -> Costs:
    """What passes of this model cost on this machine, from memory, from disk, or measured now (about sixty passes).

    Also lets the model pad its passes to the widths at which it is quicker, unless they have several rows (`costs_by`).
    """
    book = _books[-1] if _books else None
    costs = _held_or_measured(model) if book is None else book.of(model)
    if not isinstance(model, PadsWidths):
        return costs
    if book is not None and book.rows > 1:
        model.pad_widths(lambda tokens, context: tokens)  # noqa: ARG005
        return costs
    padded = replace(costs, padded=True)
    model.pad_widths(lru_cache(maxsize=4096)(padded.width))
    return padded


def _held_or_measured(model: LanguageModel, rows: int = 1) -> Costs:
    key = _key(model, rows)
    if key not in _measured:
        path = _path(key) if hasattr(model, "fingerprint") else None  # tables are not the same in the next run
        found = _read(path) if path else None
        if found is None:
            if isinstance(model, PadsWidths):
                model.pad_widths(lambda tokens, context: tokens)  # noqa: ARG005
            found, settled = _measure_settled(model, rows)
            if path and settled:
                about = {"model": model.name, "seconds": dict(found.verify_seconds), "per_token": dict(found.per_token)}
                path.write_text(json.dumps({**about, "context": found.context}, indent=1))
        _measured[key] = found
    return _measured[key]


def kept_costs(model: LanguageModel) -> Costs | None:
    """What is known of a model's passes without measuring any, from memory or from disk."""
    key = _key(model)
    path = _path(key) if hasattr(model, "fingerprint") else None
    found = _measured.get(key) or (_read(path) if path else None)
    return None if found is None else replace(found, padded=isinstance(model, PadsWidths))


def forget_costs(model: LanguageModel, at_once: bool = True) -> None:
    """Make the next `measured_costs` of this model measure anew, or only those of later processes."""
    key = _key(model)
    if at_once:
        _measured.pop(key, None)
    if path := _path(key):
        path.unlink(missing_ok=True)


def review_costs(model: LanguageModel, passes: Iterable[tuple[int, int, float]], at_once: bool = True) -> bool:
    """Forget a model's table if real passes refute it, so that the next `measured_costs` measures anew.

    passes: (new tokens, context, seconds) of each. A table that was measured while the machine was busy would otherwise
    decide about drafting for ever. at_once: False keeps it in this process, where the same seed is to give the same tokens.
    Returns whether the table was forgotten.
    """
    held = _measured.get(_key(model))
    passes = list(passes)
    if held is None or len(passes) < ENOUGH_ROUNDS:
        return False
    costs = replace(held, padded=isinstance(model, PadsWidths))
    ratio = median(seconds / costs.verify(tokens, context) for tokens, context, seconds in passes)
    off = median(abs(seconds - costs.verify(tokens, context)) for tokens, context, seconds in passes)
    if 1 / REFUTED <= ratio <= REFUTED or off < WORTH_REVIEWING:
        return False
    _log.warning("passes of %s take %.2g times what its cost table says: it will be measured again", model.name, ratio)
    forget_costs(model, at_once)
    return True


def _measure_settled(model: LanguageModel, rows: int) -> tuple[Costs, bool]:
    """The quickest of a few attempts, ended by the first one whose repetitions agree. → the costs, whether they agreed"""
    best: Costs | None = None
    for _ in range(ATTEMPTS):
        found, noise = _measure(model) if rows == 1 else _measure_rows(model, rows)
        best = found if best is None or found.verify(1) < best.verify(1) else best
        if noise <= UNSETTLED:
            return found, True
    assert best is not None
    _log.warning("the machine is busy: costs of %s are measured again in the next run", model.name)
    return best, False


def _measure(model: LanguageModel) -> tuple[Costs, float]:
    """A cost table and its noise: median / least seconds of the same pass, in the middle of the sizes."""
    limit = model.max_length or LONG_CONTEXT + max(SIZES)
    short = max(1, min(CONTEXT, limit - max(SIZES)))
    times = _times(model, SIZES, short)
    noise = median(median(taken) / min(taken) for taken in times.values())
    near = _medians(times)
    far = min(LONG_CONTEXT, limit - max(LONG_SIZES))
    if far <= 2 * short or not can_pretend(model):
        return Costs(near, context=short), noise
    distant = time_scoring(model, LONG_SIZES, far)
    slopes = {n: float(f"{max(0.0, distant[n] - near[n]) / (far - short):.3g}") for n in distant if n in near}
    return Costs(near, slopes, short), noise


def _measure_rows(model: LanguageModel, rows: int) -> tuple[Costs, float]:
    """The same for passes of several rows, after a short context only."""
    short = max(1, min(CONTEXT, (model.max_length or LONG_CONTEXT) - max(BATCH_SIZES)))
    times = _times(model, BATCH_SIZES, short, rows)
    return Costs(_medians(times), context=short), median(median(taken) / min(taken) for taken in times.values())


def time_scoring(model: LanguageModel, sizes: tuple[int, ...], context: int) -> dict[int, float]:
    """{n: median seconds to score n new tokens after `context` tokens and to choose a token after each}, to three digits."""
    return _medians(_times(model, sizes, context))


def _medians(times: dict[int, list[float]]) -> dict[int, float]:
    return {n: float(f"{median(taken):.3g}") for n, taken in times.items()}


def _times(model: LanguageModel, sizes: tuple[int, ...], context: int, rows: int = 1) -> dict[int, list[float]]:
    """{n: the seconds of each repetition}, n tokens of each of so many rows.

    The sizes take turns, so that whatever else the machine does meets all of them.
    """
    with PassTimer(model, sizes, context, rows) as timer:
        seconds: dict[int, list[float]] = {n: [] for n in timer.sizes}
        for repeat in range(REPEATS + 1):
            for n in timer.sizes:
                took = timer.time(n)
                if repeat:  # the first pass warms up
                    seconds[n].append(took)
    return seconds


def _key(model: LanguageModel, rows: int = 1) -> str:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor()
    kind = getattr(model, "fingerprint", id(model))
    parts = [model.name, kind, model.vocab_size, device, os.cpu_count(), torch.get_num_threads()]
    parts += [torch.__version__, "median with sampling", SIZES, LONG_SIZES, CONTEXT, LONG_CONTEXT]
    if rows > 1:
        parts += [rows, BATCH_SIZES]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _path(key: str) -> Path | None:
    try:
        folder = cache_folder() / "costs"
        folder.mkdir(exist_ok=True)
    except (CacheFolderError, OSError) as error:
        _log.warning("measured costs are not kept: %s", error)
        return None
    return folder / f"{key}.json"


def _read(path: Path) -> Costs | None:
    try:
        found = _from_dict(json.loads(path.read_text()))
        return found if 1 in found.verify_seconds else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _from_dict(held: Mapping[str, Any]) -> Costs:
    seconds, slopes = ({int(n): float(s) for n, s in held[name].items()} for name in ("seconds", "per_token"))
    return Costs(seconds, slopes, int(held["context"]))
