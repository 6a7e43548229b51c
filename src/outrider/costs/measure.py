"""Measuring what passes of a model cost on this machine: some fifty, twice as many where a change of width costs
something, and again where something else kept it busy.
"""

from __future__ import annotations

import time
from math import inf
from statistics import median

import torch

from outrider.costs.pass_timer import Follows, PassTimer, can_pretend
from outrider.costs.table import CONTEXT, Costs, PadsWidths
from outrider.models.base import LanguageModel

SIZES = (1, 2, 4, 6, 8, 12, 17)
PADDED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 17)  # four tokens may be quicker than three: each has to be seen
BATCH_SIZES, FEW_SIZES = (1, 2, 4, 8, 16), 3  # of each of several rows: passes of so many tokens or fewer, these at least
WIDE = 64
# Of the passes that are measured for lists: sixteen rows of four tokens are as much work as a pass is quick for.
LIST_ROWS = (2, 4, 8, 16)
LONG_SIZES = (1, 2, 8, 17)
SIZES_BEHIND = (1, 2, 5, 33)  # of a draft that reads another model's states: few tokens a round, many after a pause
LONG_CONTEXT = 2048
REPEATS = 4
SETTLING = 2  # passes of a size that are not counted, of what comes behind another model
LONG_REPEATS = 3  # what a context adds is small beside a pass
ATTEMPTS = 3
PATIENCE = 10.0  # seconds after which there is no further attempt, and of one attempt what is not needed is left out
FEWEST = 2  # repetitions, however long they take: of one nobody knows whether it was disturbed
UNSETTLED = 1.4  # median / least of the same pass: beyond this something else is using the machine
PREEMPTED = 40.0  # times a second that a thread has to give way: 12 to 18 on a quiet machine, 80 and more beside others


def sizes_of(model: LanguageModel) -> tuple[int, ...]:
    """New tokens of the passes that are timed after a short context."""
    if isinstance(model, Follows):
        return SIZES_BEHIND
    return PADDED_SIZES if isinstance(model, PadsWidths) else SIZES


def batch_sizes(rows: int) -> tuple[int, ...]:
    """New tokens of each of several rows, in passes that are timed."""
    return tuple(n for i, n in enumerate(BATCH_SIZES) if i < FEW_SIZES or n * rows <= WIDE)


def measure_settled(model: LanguageModel, rows: int, attempts: int = ATTEMPTS) -> tuple[Costs, int, bool]:
    """The quickest of a few attempts, ended by the first one whose repetitions agree. → it, how many, whether one agreed"""
    best: Costs | None = None
    made, began = 0, time.perf_counter()
    while made < attempts and (made == 0 or time.perf_counter() - began < PATIENCE):
        made += 1
        before, start = _preemptions(), time.perf_counter()
        found, noise = _measure(model) if rows == 1 else _measure_rows(model, rows)
        seconds = (time.perf_counter() - start) * torch.get_num_threads()
        if _preemptions() - before > PREEMPTED * seconds + 1:  # repetitions agree where all of them are as slow
            noise = inf
        best = found if best is None or found.verify(1) < best.verify(1) else best
        if noise <= UNSETTLED:
            return found, made, True
    assert best is not None
    return best, made, False


def _preemptions() -> int:
    """How often threads of this process had to give way to others so far; 0 on systems that don't tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _measure(model: LanguageModel) -> tuple[Costs, float]:
    """A cost table and its noise: median / least seconds of the same pass, in the middle of the sizes."""
    limit, late = model.max_length or LONG_CONTEXT + max(SIZES), time.perf_counter() + PATIENCE
    short = max(1, min(CONTEXT, limit - max(SIZES)))
    times, change, warm = _times(model, sizes_of(model), short, late)
    monotone = not isinstance(model, PadsWidths)
    if isinstance(model, Follows):
        return _measure_behind(model, times, warm, short, limit, late)
    noise = _noise(times)
    near = _table(times, noise, monotone)
    far = min(LONG_CONTEXT, limit - max(LONG_SIZES))
    if far <= 2 * short or not can_pretend(model) or time.perf_counter() > late:
        return Costs(near, context=short, change=change * noise, warm=warm), noise
    distant = _table(_times(model, LONG_SIZES, far, late, repeats=LONG_REPEATS, warm=True)[0], noise, monotone)
    slopes = _slopes(near, distant, far - short, monotone)
    return Costs(near, slopes, short, change=change * noise, warm=warm), noise


def _measure_behind(
    model: LanguageModel, times: dict[int, list[float]], warm: float, short: int, limit: int, late: float
) -> tuple[Costs, float]:
    """The same of what comes after another model's passes, by medians: whether its weights were still in the caches is
    chance, and a table of the least would be one of a chance that never lasts.
    """

    def typical(times: dict[int, list[float]]) -> dict[int, float]:
        seconds = _rising([median(times[n]) for n in sorted(times)])
        return {n: float(f"{each:.3g}") for n, each in zip(sorted(times), seconds, strict=True)}

    noise = median(median(taken) / sorted(taken)[len(taken) // 4] for taken in times.values())
    near, far = typical(times), min(LONG_CONTEXT, limit - max(SIZES_BEHIND))
    if far <= 2 * short or not can_pretend(model) or time.perf_counter() > late:
        return Costs(near, context=short, warm=warm), noise
    distant = typical(_times(model, SIZES_BEHIND, far, late, repeats=LONG_REPEATS, warm=True)[0])
    return Costs(near, _slopes(near, distant, far - short, monotone=True), short, warm=warm), noise


def _slopes(near: dict[int, float], distant: dict[int, float], between: int, monotone: bool) -> dict[int, float]:
    """Seconds by size that each of so many tokens of context adds."""
    both = [n for n in sorted(distant) if n in near]
    rises = [max(0.0, distant[n] - near[n]) / between for n in both]
    if monotone:  # else a wider pass would seem quicker after a context longer than these
        rises = _rising(rises)
    return {n: float(f"{rise:.3g}") for n, rise in zip(both, rises, strict=True)}


def _measure_rows(model: LanguageModel, rows: int) -> tuple[Costs, float]:
    """The same for passes of several rows, after a short context only."""
    sizes, late = batch_sizes(rows), time.perf_counter() + PATIENCE
    short = max(1, min(CONTEXT, (model.max_length or LONG_CONTEXT) - max(sizes)))
    times, change, warm = _times(model, sizes, short, late, rows, repeats=LONG_REPEATS)
    noise, monotone = _noise(times), not isinstance(model, PadsWidths)
    return Costs(_table(times, noise, monotone), context=short, change=change * noise, warm=warm), noise


def _rising(values: list[float]) -> list[float]:
    """Those next to each other that do not rise share their mean."""
    from scipy.optimize import isotonic_regression  # half a second, for what is done once per model and machine

    return isotonic_regression(values).x.tolist()  # type: ignore[no-any-return]


def _noise(times: dict[int, list[float]]) -> float:
    return median(median(taken) / min(taken) for taken in times.values())


def _table(times: dict[int, list[float]], noise: float, monotone: bool) -> dict[int, float]:
    """Seconds by size: how sizes compare by the least of each, since whatever disturbs a pass only adds to it; how long they
    take by the noise of all of them.

    monotone: of an engine that would gain by a wider pass, if it were quicker, and does not take it: where one seems quicker
    it is chance, and drafts would be made for its sake. Its neighbours share their mean then.
    """
    sizes = sorted(times)
    least: list[float] = [min(times[n]) for n in sizes]
    if monotone:
        least = _rising(least)
    return {n: float(f"{seconds * noise:.3g}") for n, seconds in zip(sizes, least, strict=True)}


def _times(
    model: LanguageModel,
    sizes: tuple[int, ...],
    context: int,
    late: float,
    rows: int = 1,
    repeats: int = REPEATS,
    warm: bool = False,
) -> tuple[dict[int, list[float]], float, float]:
    """{n: the seconds of each repetition}, n tokens of each of so many rows; what a change of the width adds; and what a
    token takes less right after another (`Costs.warm`).

    The sizes take turns, so that whatever else the machine does meets all of them. warm: passes of these sizes were made
    just before. late: when (`perf_counter`) no more than `FEWEST` repetitions are made.
    """
    with PassTimer(model, sizes, context, rows) as timer:
        if timer.follows:
            return _times_behind(timer, repeats, late)
        seconds: dict[int, list[float]] = {n: [] for n in timer.sizes}
        for _ in range(0 if warm else 1):
            for n in timer.sizes:
                timer.time(n)
        for repeated in range(repeats):
            if repeated >= FEWEST and time.perf_counter() > late:
                break
            timer.time(timer.sizes[0])  # after the widest it would be slower than in plain decoding, after itself
            for n in timer.sizes:
                seconds[n].append(timer.time(n))
        added = [min(taken) - min(seconds[n]) for n, taken in timer.changed.items()]
    return seconds, max(0.0, float(f"{median(added):.3g}")) if added else 0.0, 0.0


def _times_behind(timer: PassTimer, repeats: int, late: float) -> tuple[dict[int, list[float]], float, float]:
    """The same of what comes after another model's passes, each size for itself, as rounds with it follow each other: what
    comes seldom is slower, and whether its weights were still in the caches, single passes do not tell.
    """
    seconds: dict[int, list[float]] = {}
    warm = 0.0
    for n in timer.sizes:
        pairs: list[tuple[float, float]] = []
        while len(pairs) < SETTLING + (repeats if time.perf_counter() < late else min(repeats, FEWEST)):
            pairs.append((timer.time(n), timer.time(n, again=True) if n == 1 else 0.0))
        pairs = pairs[SETTLING:]
        seconds[n] = [took for took, _ in pairs]
        if n == 1:
            warm = median(took - again for took, again in pairs)
    return seconds, 0.0, max(0.0, float(f"{warm:.3g}"))
