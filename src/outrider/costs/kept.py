"""Cost tables kept in memory and on disk, once per model, number of rows, kind of processor and number of threads.

They are not measured anew in each run, and a process that has a table keeps it unless `forget_costs` is called: the adaptive
draft length follows from these numbers, so they must be the same for the same seed to give the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from outrider.costs.measure import ATTEMPTS, LIST_ROWS, LONG_CONTEXT, LONG_SIZES, batch_sizes, measure_settled, sizes_of
from outrider.costs.table import CONTEXT, Costs, PadsWidths
from outrider.errors import CacheFolderError
from outrider.models.base import LanguageModel
from outrider.support.cache_folder import cache_folder, told, warn_unkept
from outrider.support.processor import processor_kind
from outrider.support.whole_files import replace_whole

REFUTED = 2.0  # rounds that take this many times as long or as short as the table says: it was measured at a bad moment
WORTH_REVIEWING = 0.003  # seconds a pass: below that, Python's own time is a large share
ENOUGH_ROUNDS = 8
UNUSUAL = 8.0  # seconds of measuring, after which it is told
GIVE_UP = 3 * ATTEMPTS
MOST_REFUTED = 3  # tables of a model: where three did not last, the machine changes, and a fourth will not last either
_log = logging.getLogger(__name__)
_measured: dict[str, Costs] = {}
_refuted: set[str] = set()  # tables that only this process keeps: one warning each
_busy: list[str] = []  # models whose costs found no quiet moment: what that means is told with the first


@dataclass(frozen=True)
class _Kept:
    """What a file holds. costs: the table, None once refuted. attempts: those that found no quiet moment.

    refuted: how many tables were. again: whether the next process is to measure.
    """

    costs: Costs | None = None
    attempts: int = 0
    refuted: int = 0
    again: bool = True


def held_or_measured(model: LanguageModel, rows: int = 1) -> Costs:
    """The table on this machine for passes of so many rows, without padding; measured now if there is none."""
    key = _key(model, rows)
    if key not in _measured:
        path, kept = _on_disk(model, key)
        _measured[key] = kept.costs if kept.costs is not None and not kept.again else _measure(model, rows, path, kept)
        if not hasattr(model, "fingerprint"):  # it is known by its address, which another model may have one day
            with suppress(TypeError):  # a class with slots alone can't tell its end
                weakref.finalize(model, _forget_key, key)
    return _measured[key]


def _measure(model: LanguageModel, rows: int, path: Path | None, before: _Kept) -> Costs:
    """Measure a table, or once more one that earlier processes found no quiet moment for, and keep it.

    The quickest of `GIVE_UP` is kept for good: where a machine is always busy, every start would measure otherwise.
    """
    if isinstance(model, PadsWidths):
        model.pad_widths(lambda tokens, context: tokens)  # noqa: ARG005
    several = f" with {rows} rows" if rows > 1 else ""
    with told(f"measuring what passes of {model.name} cost{several}", after=UNUSUAL):
        measured, made, settled = measure_settled(model, rows, 1 if before.attempts or before.refuted else ATTEMPTS)
    if not settled and before.costs is not None and before.costs.verify(1) < measured.verify(1):
        measured = before.costs
    attempts = before.attempts + (0 if settled else made)
    again = not settled and attempts < GIVE_UP
    if again:
        _busy.append(model.name)
        _tell_of_a_busy_machine(model.name, first=len(_busy) == 1)
    if path:
        _keep(path, model, _Kept(measured, attempts, before.refuted, again))
    return measured


def _tell_of_a_busy_machine(name: str, first: bool) -> None:
    if not first:
        _log.warning("the machine is busy: costs of %s are measured again, too", name)
        return
    hint = "" if torch.get_num_threads() == 1 else "; beside other work one thread (--threads 1) may be quicker"
    _log.warning(
        "the machine is busy: costs of %s are measured again in the next run, where a seed may give another text unless "
        "num_draft_tokens is fixed or drafter_invariant asked for%s",
        name,
        hint,
    )


def kept_costs(model: LanguageModel) -> Costs | None:
    """What is known of a model's passes without measuring any, from memory or from disk."""
    key = _key(model)
    found = _measured.get(key) or _on_disk(model, key)[1].costs
    return None if found is None else replace(found, padded=isinstance(model, PadsWidths))


def _forget_key(key: str) -> None:
    _measured.pop(key, None)
    _refuted.discard(key)


def forget_costs(model: LanguageModel) -> None:
    """Make the next `measured_costs` of this model measure anew, for one row and for lists of prompts."""
    for rows in (1, *LIST_ROWS):
        key = _key(model, rows)
        _forget_key(key)
        _unlink(key)


def review_costs(model: LanguageModel, passes: Iterable[tuple[int, int, float]]) -> bool:
    """Remove a model's table from the disk if real passes refute it, so that the next process measures anew.

    passes: (new tokens, context, seconds) of each. A table that was measured while the machine was busy would otherwise
    decide about drafting for ever. This process keeps it: a seed, be it one that a result has named, is to give the same
    tokens again, and it may well be these passes that something disturbed. After `MOST_REFUTED` the last one is kept.
    Returns whether the table was removed.
    """
    key = _key(model)
    held = _measured.get(key)
    passes = list(passes)
    if held is None or len(passes) < ENOUGH_ROUNDS or key in _refuted:
        return False
    costs = replace(held, padded=isinstance(model, PadsWidths))
    ratio = median(seconds / costs.verify(tokens, context) for tokens, context, seconds in passes)
    off = median(abs(seconds - costs.verify(tokens, context)) for tokens, context, seconds in passes)
    if 1 / REFUTED <= ratio <= REFUTED or off < WORTH_REVIEWING:
        return False
    path, kept = _on_disk(model, key)
    if kept.refuted >= MOST_REFUTED:
        return False
    _log.warning("passes of %s take %.2g times what its cost table says: the next run measures it again", model.name, ratio)
    _refuted.add(key)
    if path:
        _keep(path, model, _Kept(None, kept.attempts, kept.refuted + 1))
    return True


def _keep(path: Path, model: LanguageModel, kept: _Kept) -> None:
    """A table that can't be written is no reason to end a generation: the next process measures it again."""
    counts = {"attempts": kept.attempts, "refuted": kept.refuted, "again": kept.again}
    table = {} if kept.costs is None else kept.costs.to_dict()
    try:
        replace_whole(path, json.dumps({"model": model.name, **counts, **table}, indent=1))
    except OSError as error:
        _log.warning("measured costs are not kept: %s", error)


def _unlink(key: str) -> None:
    if path := _path(key):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("kept costs can't be removed: %s", error)


def _key(model: LanguageModel, rows: int = 1) -> str:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else processor_kind()
    kind = getattr(model, "fingerprint", id(model))
    parts = [model.name, kind, model.vocab_size, device, os.cpu_count(), torch.get_num_threads()]
    parts += [
        torch.__version__,
        "least with sampling, noise, monotone, change, one after one, last of few",
        sizes_of(model),
        LONG_SIZES,
        CONTEXT,
        LONG_CONTEXT,
    ]
    if rows > 1:
        parts += [rows, batch_sizes(rows)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _on_disk(model: LanguageModel, key: str) -> tuple[Path | None, _Kept]:
    """A model's file, if it can have one, and what that holds; without a fingerprint none: the next run has another key."""
    path = _path(key) if hasattr(model, "fingerprint") else None
    return path, _Kept() if path is None else _read(path)


def _path(key: str) -> Path | None:
    try:
        folder = cache_folder() / "costs"
        folder.mkdir(exist_ok=True)
    except CacheFolderError as error:
        warn_unkept(str(error))
        return None
    except OSError as error:
        _log.warning("measured costs are not kept: %s", error)
        return None
    return folder / f"{key}.json"


def _read(path: Path) -> _Kept:
    """What a file holds, as far as it can be read."""
    try:
        held = json.loads(path.read_text())
        attempts, refuted = int(held.get("attempts", 0)), int(held.get("refuted", 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return _Kept()
    try:
        costs = Costs.from_dict(held)
        if 1 not in costs.verify_seconds:
            raise ValueError
    except (ValueError, KeyError, AttributeError, TypeError):
        return _Kept(None, attempts, refuted)
    return _Kept(costs, attempts, refuted, bool(held.get("again", attempts)))
