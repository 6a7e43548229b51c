"""Contenders answering the same prompts in one run: the frame of every comparison of speed.

Every contender answers every prompt; the order rotates from prompt to prompt. A rate is new tokens over wall time, reading
the prompt included, since other projects do not tell them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from outrider.bench.resumed import Resumed
from outrider.bench.settings import Setting
from outrider.bench.statistics import Spread, paired_ratios, spread
from outrider.bench.tasks import Task
from outrider.generation import generate
from outrider.models.base import TextModel
from outrider.request.prompts import Asked
from outrider.support.run_log import RunLog

WARM_UP_TOKENS = 16
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One prompt answered by one contender. tokens_per_round: ours only."""

    contender: str
    setting: str
    task: str
    tokens: int
    seconds: float
    tokens_per_round: float | None = None
    acceptance_rate: float | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


Contender = Callable[[Asked, Setting, int, int], tuple[int, float | None, float | None]]
"""(prompt, setting, max_new_tokens, seed) → new tokens, tokens per round, acceptance rate"""


def ours(target: TextModel, draft: Any) -> Contender:
    """Outrider, with this draft."""

    def run(prompt: Asked, setting: Setting, tokens: int, seed: int) -> tuple[int, float, float | None]:
        result = generate(
            target,
            prompt,
            draft=draft,
            max_new_tokens=tokens,
            seed=seed,
            **setting.sampling.options(),
        )
        return len(result.tokens), result.stats.mean_acceptance_length, result.stats.acceptance_rate

    return run


def in_turn(entries: Sequence[T], number: int) -> list[T]:
    """The entries, beginning with another one for each prompt, so that none always runs first."""
    turn = number % len(entries)
    return [*entries[turn:], *entries[:turn]]


def measure(
    contenders: Mapping[str, Contender],
    asked: Sequence[tuple[Task, Asked]],
    settings: Sequence[Setting],
    max_new_tokens: int,
    kept: RunLog,
) -> Iterator[Run]:
    """Run everything that the log does not hold yet, append it there, and yield all runs. asked: tasks, as they are put."""
    runs = Resumed(kept, Run, lambda run: (run.contender, run.setting, run.task))
    entries = list(contenders.items())
    for number, (task, prompt) in enumerate(asked):
        for setting in settings:
            for name, contender in in_turn(entries, number):
                yield runs.run(
                    (name, setting.name, task.name),
                    partial(_timed, name, contender, prompt, setting, task, max_new_tokens, number),
                    name,
                    partial(contender, prompt, setting, WARM_UP_TOKENS, 0),
                )


def _timed(name: str, contender: Contender, prompt: Asked, setting: Setting, task: Task, tokens: int, seed: int) -> Run:
    start = time.perf_counter()
    count, per_round, rate = contender(prompt, setting, tokens, seed)
    return Run(name, setting.name, task.name, count, time.perf_counter() - start, per_round, rate)


@dataclass(frozen=True)
class Row:
    """A contender's figures at one setting. against: {peer: our rate / its rate, prompt by prompt}."""

    contender: str
    setting: str
    rate: Spread
    tokens_per_round: float | None
    acceptance_rate: float | None
    against: dict[str, Spread]


def summarise(runs: Sequence[Run], pairs: Mapping[str, Sequence[str]]) -> list[Row]:
    """A row per setting and contender. pairs: whom each contender is compared with."""
    rows = []
    for setting in dict.fromkeys(run.setting for run in runs):
        by_name: dict[str, dict[str, Run]] = {}
        for run in runs:
            if run.setting == setting:
                by_name.setdefault(run.contender, {})[run.task] = run
        for name, mine in by_name.items():
            against = {
                peer: paired_ratios([mine[t].rate for t in mine], [by_name[peer][t].rate for t in mine])
                for peer in pairs.get(name, ())
                if peer in by_name and mine.keys() <= by_name[peer].keys()
            }
            lengths = [run.tokens_per_round for run in mine.values() if run.tokens_per_round is not None]
            rates = [run.acceptance_rate for run in mine.values() if run.acceptance_rate is not None]
            rows.append(
                Row(
                    name,
                    setting,
                    spread([run.rate for run in mine.values()]),
                    sum(lengths) / len(lengths) if lengths else None,
                    sum(rates) / len(rates) if rates else None,
                    against,
                )
            )
    return rows


@dataclass(frozen=True)
class Best:
    """The quickest of ours against the quickest of the others at one setting, by median rate. ratio: prompt by prompt."""

    setting: str
    own: str
    peer: str
    ratio: Spread


def best(runs: Sequence[Run], own: Collection[str]) -> list[Best]:
    """own: the names of our contenders. Nothing where one side is empty."""
    found = []
    for setting in dict.fromkeys(run.setting for run in runs):
        rates: dict[str, dict[str, float]] = {}
        for run in runs:
            if run.setting == setting:
                rates.setdefault(run.contender, {})[run.task] = run.rate
        order = sorted(rates, key=lambda name: spread(list(rates[name].values())).median, reverse=True)
        mine, theirs = ([name for name in order if (name in own) is side] for side in (True, False))
        if mine and theirs:
            first, second = rates[mine[0]], rates[theirs[0]]
            ratio = paired_ratios([first[task] for task in first], [second[task] for task in first])
            found.append(Best(setting, mine[0], theirs[0], ratio))
    return found
