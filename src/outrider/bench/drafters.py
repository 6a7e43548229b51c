"""Texts × drafters × temperatures: adaptive drafting beside plain decoding, fixed lengths and the oracle.

Each cell times plain decoding and the adaptive policy one right after the other, in either order in turn, several times,
with the same seeds; its figure is the median of these pairs. What pairs say of nothing at all is measured beside it: a
control times plain decoding twice. Of fixed lengths only the rounds are of interest, which greedy are the same in every
repetition. When sampling, each policy gives a text of its own, so a cell takes several seeds, and what one policy has over
another is for the most part what their texts are; tokens drawn by position (`drafter_invariant`) make one text of them all.
The oracle knows beforehand how many drafted tokens will be accepted (Leviathan 3.5): its time is worked out from a run of
the longest fixed length and the measured costs.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist, fmean, median
from typing import Any

from outrider.bench.resumed import Resumed
from outrider.bench.statistics import captured_share
from outrider.bench.tasks import Task
from outrider.costs import DraftSeconds, measured_costs
from outrider.draft_length.predicted import oracle_seconds, predicted_seconds
from outrider.drafters import Drafter
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.support.run_log import RunLog

FIXED = (2, 4, 8)
CONTROL = "none: plain again"


@dataclass(frozen=True)
class Matrix:
    """What each text and drafter go through. seeds: texts of a cell when sampling; drafter_invariant: as in `generate`."""

    temperatures: Sequence[float]
    max_new_tokens: int
    repetitions: int
    seeds: int
    drafter_invariant: bool = False


@dataclass(frozen=True)
class Run:
    """One generation. lengths: {tokens drafted in a round: rounds}. table_seconds: its time by the measured costs.

    digest: of its tokens; empty in logs of older versions.
    """

    text: str
    drafter: str
    temperature: float
    policy: str
    repetition: int
    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    tested: int
    lengths: dict[int, int]
    table_seconds: float
    oracle_seconds: float
    digest: str = ""


@dataclass(frozen=True)
class Cell:
    """A text, a drafter, a temperature.

    speedup, spread: plain time / adaptive time, per token, as measured: median, least and most over the repetitions.
    table, fixed, oracle: the same by the cost tables, which the noise of the machine can't touch: of the adaptive policy, of
    each fixed length, and of the oracle. tokens_per_second: of the adaptive policy. pairs: the measured ratios.
    """

    text: str
    drafter: str
    temperature: float
    speedup: float
    spread: tuple[float, float]
    pairs: tuple[float, ...]
    table: float
    fixed: dict[int, float]
    oracle: float
    tokens_per_second: float
    acceptance_rate: float | None
    tokens_per_round: float
    lengths: dict[int, int]

    @property
    def against_best_fixed(self) -> float:
        """Adaptive over the best of the fixed lengths, 0 among them, chosen in hindsight."""
        return self.table / max([1.0, *self.fixed.values()])

    @property
    def captured(self) -> float | None:
        """The share of the oracle's gain in time that the adaptive policy had; None where there is next to none."""
        return captured_share(self.table, self.oracle)


def measure(
    target: TextModel, drafters: dict[str, Drafter], texts: Sequence[Task], matrix: Matrix, kept: RunLog
) -> Iterator[Run]:
    """Run what `kept` does not hold yet, append it there, and yield all runs."""
    runs = Resumed(kept, _read, _key)
    for text in texts:
        for temperature in matrix.temperatures:
            for repetition in range(matrix.repetitions):
                for drafter, policy in _turns(list(drafters), temperature, repetition):
                    plan = (temperature, policy, repetition)
                    asked = (target, (drafter, drafters.get(drafter)), text, plan, matrix)
                    yield runs.run((text.name, drafter, *plan), partial(_run, *asked))


def count_runs(drafters: int, texts: int, temperatures: Sequence[float], repetitions: int) -> int:
    """How many runs `measure` yields."""
    names = [""] * drafters
    return texts * sum(len(_turns(names, value, turn)) for value in temperatures for turn in range(repetitions))


def _turns(names: list[str], temperature: float, repetition: int) -> list[tuple[str, str]]:
    """(drafter, policy): every drafter's pair, the control's among them, and its fixed lengths where they are new.

    Each repetition begins with another drafter.
    """
    turns: list[list[tuple[str, str]]] = []
    for place, name in enumerate([CONTROL, *names]):
        pair = [(name, "plain"), (name, "adaptive")]
        turns.append(pair if (repetition + place) % 2 == 0 else pair[::-1])
        if name != CONTROL and (temperature > 0 or repetition == 0):
            turns[-1] += [(name, str(length)) for length in FIXED]
    at = repetition % len(turns)
    return [turn for group in turns[at:] + turns[:at] for turn in group]


def _run(
    target: TextModel,
    drafter: tuple[str, Drafter | None],
    text: Task,
    plan: tuple[float, str, int],
    matrix: Matrix,
) -> Run:
    """plan: temperature, policy, repetition."""
    temperature, policy, repetition = plan
    seeds = matrix.seeds if temperature else 1
    name, made = drafter
    fixed = policy not in ("plain", "adaptive")
    options: dict[str, Any] = {
        "draft": None if policy == "plain" else made,
        "num_draft_tokens": int(policy) if fixed else None,
        "max_new_tokens": matrix.max_new_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "drafter_invariant": matrix.drafter_invariant,
    }
    numbers = [repetition * seeds + i for i in range(seeds)]
    costs = measured_costs(target)
    if fixed and not matrix.drafter_invariant:  # whose texts depend on their rows
        results = generate(target, [text.prompt] * seeds, seed=numbers, **options)
    else:
        results = [generate(target, text.prompt, seed=number, **options) for number in numbers]
    if made is not None and policy != "plain":
        made.measure()  # what was measured for the runs' own copies of it (`apart`)
    steps = made.part_seconds() if made is not None else {}
    own = made.seconds if made is not None else DraftSeconds()
    every = [result.stats for result in results]
    return Run(
        text=text.name,
        drafter=name,
        temperature=temperature,
        policy=policy,
        repetition=repetition,
        tokens=sum(stats.tokens for stats in every),
        seconds=sum(stats.decode_seconds for stats in every),
        rounds=sum(stats.rounds for stats in every),
        drafted=sum(stats.drafted for stats in every),
        accepted=sum(stats.accepted for stats in every),
        tested=sum(stats.tested for stats in every),
        lengths=dict(Counter(r.drafted for result in results for r in result.rounds)),
        table_seconds=sum(predicted_seconds(r.rounds, costs, steps, r.prompt_tokens) for r in results),
        oracle_seconds=sum(oracle_seconds(r.rounds, costs, own, r.prompt_tokens) for r in results),
        digest=hashlib.blake2b(repr([r.tokens for r in results]).encode(), digest_size=8).hexdigest(),
    )


def _key(run: Run) -> tuple[str, str, float, str, int]:
    return run.text, run.drafter, run.temperature, run.policy, run.repetition


def _read(lengths: dict[str, int], **entry: Any) -> Run:
    return Run(**entry, lengths={int(length): count for length, count in lengths.items()})


def of_one_text(runs: Sequence[Run]) -> tuple[int, int]:
    """How many runs with a drafter have the very tokens of their plain one, and of how many that is known."""
    plain = {(run.text, run.drafter, run.temperature, run.repetition): run for run in runs if run.policy == "plain"}
    pairs = [
        (run, plain[run.text, run.drafter, run.temperature, run.repetition])
        for run in runs
        if run.policy != "plain" and run.drafter != CONTROL and run.digest
    ]
    return sum(run.digest == base.digest for run, base in pairs), len(pairs)


def summarise(runs: Sequence[Run]) -> list[Cell]:
    """A cell per text, drafter and temperature, in the order of the runs; the control's, too."""
    groups: dict[tuple[str, str, float], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.text, run.drafter, run.temperature), []).append(run)
    return [_cell(group) for group in groups.values()]


def _cell(runs: list[Run]) -> Cell:
    plain = {run.repetition: run for run in runs if run.policy == "plain"}

    def ratio(run: Run, seconds: str, plain_seconds: str | None = None) -> float:
        base = plain[run.repetition]
        return float(getattr(base, plain_seconds or seconds) / base.tokens / (getattr(run, seconds) / run.tokens))

    def by_table(policy: str) -> float:
        return median(ratio(run, "table_seconds") for run in runs if run.policy == policy)

    adaptive = [run for run in runs if run.policy == "adaptive"]
    longest = [run for run in runs if run.policy == str(max(FIXED))]
    lengths = sum((Counter(run.lengths) for run in adaptive), Counter[int]())
    tested = sum(run.tested for run in adaptive)
    own = [ratio(run, "seconds") for run in adaptive]
    oracle = [ratio(run, "oracle_seconds", "table_seconds") for run in longest]
    return Cell(
        text=runs[0].text,
        drafter=runs[0].drafter,
        temperature=runs[0].temperature,
        speedup=median(own),
        spread=(min(own), max(own)),
        pairs=tuple(own),
        table=by_table("adaptive"),
        fixed={length: by_table(str(length)) for length in FIXED} if longest else {},
        oracle=median(oracle) if oracle else 1.0,
        tokens_per_second=median(run.tokens / run.seconds for run in adaptive),
        acceptance_rate=sum(run.accepted for run in adaptive) / tested if tested else None,
        tokens_per_round=sum(run.tokens for run in adaptive) / sum(run.rounds for run in adaptive),
        lengths=dict(sorted(lengths.items())),
    )


@dataclass(frozen=True)
class Noise:
    """What pairs of plain runs say. pair: standard deviation of a pair's ratio, relative. pairs: how many there were.

    cell: what the median of a cell falls below 1 by chance at most, with 95 % for all the cells together.
    """

    pair: float
    pairs: int
    cell: float

    def slower(self, cells: Sequence[Cell]) -> list[Cell]:
        """Those that are slower than plain decoding by more than chance."""
        return [cell for cell in cells if cell.drafter != CONTROL and cell.speedup < 1.0 - self.cell]


def noise_of(cells: Sequence[Cell]) -> Noise:
    """From the control's cells. Ratios are taken to scatter alike in all cells, and their logarithms normally."""
    control = [math.log(ratio) for cell in cells if cell.drafter == CONTROL for ratio in cell.pairs]
    others = [cell for cell in cells if cell.drafter != CONTROL]
    pair = math.sqrt(fmean(value * value for value in control))
    of_median = pair * math.sqrt(math.pi / 2.0 / max(1, min(len(cell.pairs) for cell in others))) if others else 0.0
    return Noise(pair, len(control), 1.0 - math.exp(NormalDist().inv_cdf(0.05 / max(1, len(others))) * of_median))


def over_all_texts(cells: Sequence[Cell]) -> dict[tuple[str, float], float]:
    """Measured speed-up by drafter and temperature: the geometric mean of all pairs."""
    logs: dict[tuple[str, float], list[float]] = {}
    for cell in cells:
        logs.setdefault((cell.drafter, cell.temperature), []).extend(map(math.log, cell.pairs))
    return {key: math.exp(fmean(values)) for key, values in logs.items()}
