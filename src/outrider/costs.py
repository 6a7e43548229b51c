"""What a pass costs: measured seconds to score n new tokens. Neither flat nor monotone in n.

Measured once per model and machine and kept on disk, not measured anew in each run: the adaptive draft length
follows from these numbers, so they must be the same for the same seed to give the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from outrider.device_data import pad_rows
from outrider.errors import CacheFolderError
from outrider.models.base import LanguageModel
from outrider.models.cache_folder import cache_folder

SIZES = (1, 2, 3, 4, 6, 8, 12, 17)
CONTEXT = 64
REPEATS = 3
_log = logging.getLogger(__name__)
_measured: dict[str, dict[int, float]] = {}


@runtime_checkable
class PadsWidths(Protocol):
    """An engine whose kernels like some widths better than others."""

    def pad_widths(self, widths: Mapping[int, int]) -> None: ...


@dataclass(frozen=True)
class Costs:
    """verify_seconds: {new tokens in a target pass: seconds}, 1 included."""

    verify_seconds: Mapping[int, float]

    def verify(self, tokens: int) -> float:
        """Seconds to score that many tokens, linear between the measured sizes and beyond them."""
        if tokens in self.verify_seconds:
            return self.verify_seconds[tokens]
        sizes = sorted(self.verify_seconds)
        if len(sizes) == 1:
            return self.verify_seconds[sizes[0]]
        at = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        slope = (self.verify_seconds[high] - self.verify_seconds[low]) / (high - low)
        return max(self.verify_seconds[low] + slope * (tokens - low), 1e-9)


def measured_costs(model: LanguageModel) -> Costs:
    """What passes of this model cost on this machine, from memory, from disk, or measured now (about thirty passes).

    Also lets the model pad its passes to the widths at which it is quicker.
    """
    return Costs(_prepared(model))


def forget_costs(model: LanguageModel) -> None:
    """Make the next `measured_costs` of this model measure anew."""
    _measured.pop(key := _key(model, SIZES), None)
    if path := _path(key):
        path.unlink(missing_ok=True)


def best_widths(seconds: Mapping[int, float]) -> dict[int, int]:
    """{n: the measured width of n or more at which n tokens are scored in the least time}, gains under 3 % ignored."""
    widths = {}
    for n in range(1, max(seconds) + 1):
        wider = [width for width in seconds if width >= n]
        best = min(wider, key=lambda width: (seconds[width], width))
        if best > n and seconds[best] < 0.97 * Costs(seconds).verify(n):
            widths[n] = best
    return widths


def _prepared(model: LanguageModel) -> dict[int, float]:
    """{n: seconds} as they are with the padding that is switched on here."""
    table = _table(model, SIZES)
    if not isinstance(model, PadsWidths):
        return table
    widths = best_widths(table)
    model.pad_widths(widths)
    return {n: table[widths.get(n, n)] for n in table}


def _table(model: LanguageModel, sizes: tuple[int, ...]) -> dict[int, float]:
    """{n: seconds} without padding."""
    key = _key(model, sizes)
    if key not in _measured:
        path = _path(key) if hasattr(model, "fingerprint") else None  # tables are not the same in the next run
        table = _read(path) if path else None
        if table is None:
            if isinstance(model, PadsWidths):
                model.pad_widths({})
            table = time_scoring(model, sizes)
            if path:
                path.write_text(json.dumps({"model": model.name, "seconds": table}, indent=1))
        _measured[key] = table
    return _measured[key]


def time_scoring(model: LanguageModel, sizes: tuple[int, ...], context: int = CONTEXT) -> dict[int, float]:
    """{n: median seconds to score n new tokens after `context` tokens}, rounded to three digits."""
    limit = model.max_length or context + max(sizes)
    context = max(1, min(context, limit - max(sizes)))
    sizes = tuple(n for n in sizes if context + n <= limit) or (1,)
    sequence = model.open(reserve=context + max(sizes))
    try:
        tokens, lengths = pad_rows([[i % model.vocab_size for i in range(context)]], model.device)
        model.score([sequence], tokens, lengths, "none")
        seconds: dict[int, list[float]] = {n: [] for n in sizes}
        for repeat in range(REPEATS + 1):
            for n in sizes:
                new, count = pad_rows([[i % model.vocab_size for i in range(n)]], model.device)
                _synchronise(model)
                start = time.perf_counter()
                model.score([sequence], new, count, "all")
                _synchronise(model)
                if repeat:  # the first pass warms up
                    seconds[n].append(time.perf_counter() - start)
                sequence.truncate(context)
    finally:
        sequence.close()
    return {n: float(f"{sorted(times)[len(times) // 2]:.3g}") for n, times in seconds.items()}


def _synchronise(model: LanguageModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _key(model: LanguageModel, sizes: tuple[int, ...]) -> str:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor()
    kind = getattr(model, "fingerprint", id(model))
    parts = [model.name, kind, model.vocab_size, device, os.cpu_count(), torch.get_num_threads()]
    parts += [torch.__version__, sizes]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _path(key: str) -> Path | None:
    try:
        folder = cache_folder() / "costs"
        folder.mkdir(exist_ok=True)
    except (CacheFolderError, OSError) as error:
        _log.warning("measured costs are not kept: %s", error)
        return None
    return folder / f"{key}.json"


def _read(path: Path) -> dict[int, float] | None:
    try:
        return {int(n): float(s) for n, s in json.loads(path.read_text())["seconds"].items()}
    except (OSError, ValueError, KeyError, AttributeError):
        return None
