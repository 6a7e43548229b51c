"""Tokens per second against the size of the batch, with and without drafts: where does speculation stop paying?

A pass of one row reads all weights for one token, and scores a few more for little; a batch of many rows has used that
slack up already, so the best draft length falls as the batch grows, in the end to 0. Every block of prompts goes through
every (batch size, draft length), the order rotating from block to block, so that the machine's moods meet all of them.
Prompts are ragged and so are the answers' lengths, fixed beforehand: at temperature 0 all cells write the same tokens.

Prediction, from the tables of passes of B rows: a round with drafts takes K · draft_B + verify_B(K + 1). A row drafts in a
share s of its rounds (measured at K in the smallest batch). Where a row of a pass costs what its own tokens do, s is the
share of such rounds; where all rows are made as wide as the widest, it is 1 - (1 - s)^B: one row that drafts is enough.
Tokens a round are those measured in the smallest batch, since they do not depend on the company.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outrider.batch.job_batch import JobBatch
from outrider.batch.jobs import Job
from outrider.batch.setup import Ready, Setup
from outrider.bench.contest import in_turn
from outrider.bench.resumed import Resumed
from outrider.bench.settings import AUTO
from outrider.bench.statistics import Spread, paired_ratios
from outrider.bench.tasks import human_eval
from outrider.costs import CostBook, Costs, DraftSeconds, costs_by, measured_costs
from outrider.drafters import Drafter
from outrider.errors import ModelError
from outrider.models.base import TextModel
from outrider.randomness import RandomStream
from outrider.request.choices import make_length
from outrider.support.run_log import RunLog

PROBLEMS = 164


@dataclass(frozen=True)
class BatchRun:
    """A block of prompts at one batch size and draft length (`AUTO`: adapted).

    seconds: wall time, prompts read included. prefill_seconds: of reading them. rounds: of all rows, added up.
    """

    batch_size: int
    length: int
    block: int
    prompts: int
    tokens: int
    seconds: float
    prefill_seconds: float
    rounds: int
    drafted: int
    accepted: int
    tested: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.batch_size, self.length, self.block

    @property
    def rate(self) -> float:
        """Tokens a second, prompts read included."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Cell:
    """What all blocks show of one batch size and length.

    rate: tokens a second; decode_rate: prompts left out. speedup: over K = 0 in the same batch, block by block. predicted:
    tokens a second without prompts, None for adapted lengths.
    """

    batch_size: int
    length: int
    rate: float
    decode_rate: float
    speedup: Spread
    tokens_per_round: float
    acceptance_rate: float | None
    predicted: float | None


def ragged_prompts(count: int, longest: int) -> list[dict[str, Any]]:
    """Prompts of many lengths, as lines for `outrider batch`: HumanEval problems, each also cut after a part of its lines.

    longest: of the answers, whose lengths lie between a quarter of it and itself, from a stream of their own.
    """
    problems = [task.prompt for task in human_eval(0, PROBLEMS - 1)]
    made = []
    for i in range(count):
        lines = problems[i % PROBLEMS].splitlines(keepends=True)
        part = max(2, len(lines) * (8 - i // PROBLEMS % 8) // 8)
        share = 0.25 + 0.75 * RandomStream(0, i).take(1)[0]
        text = "".join(lines[:part]).rstrip()
        made.append({"id": f"{i}", "prompt": text, "max_new_tokens": max(1, round(share * longest)), "ignore_eos": True})
    return made


def jobs_from(lines: Sequence[dict[str, Any]]) -> list[Job]:
    """The same as jobs."""
    return [
        Job(i, line["prompt"], {name: line[name] for name in ("max_new_tokens", "ignore_eos")})
        for i, line in enumerate(lines)
    ]


class Bench:
    """One target and draft at every batch size and length. models: the draft's models, loaded once."""

    def __init__(self, setup: Setup, target: TextModel) -> None:
        self._setup, self.target = setup, target
        self._models: dict[str, TextModel] = {}
        self.books: dict[int, CostBook] = {}

    def ready(self, batch_size: int, length: int) -> Ready:
        """Made anew for each run, since a drafter keeps the costs that it has been told."""
        book = self.books.setdefault(batch_size, CostBook(batch_size))
        with costs_by(book):
            drafter = self._drafter() if length else None
            if drafter is not None:
                drafter.bind(self.target)
            policy = make_length(None if length == AUTO else length, self.target, drafter)
        return Ready(self.target, drafter, policy, book, self._setup.defaults, chat=False)

    def costs(self, batch_size: int) -> tuple[Costs, DraftSeconds]:
        """What passes of so many rows cost, and a draft of each of them."""
        ready = self.ready(batch_size, AUTO)
        with costs_by(self.books[batch_size]):
            return measured_costs(self.target), ready.drafter.seconds if ready.drafter is not None else DraftSeconds()

    def _drafter(self) -> Drafter | None:
        def load(name: str, own: dict[str, Any]) -> TextModel:
            key = f"{name} {own}"
            if key not in self._models:
                self._models[key] = self._setup.load_draft(name, own)
            return self._models[key]

        return self._setup.drafter(self.target, load)

    def run(self, batch_size: int, length: int, block: int, jobs: Sequence[Job]) -> BatchRun:
        """A block of prompts, timed."""
        sums: dict[str, float] = dict.fromkeys(("tokens", "rounds", "drafted", "accepted", "tested", "prefill"), 0)
        with JobBatch(self.ready(batch_size, length), batch_size) as batch:
            start = time.perf_counter()
            batch.put(jobs)
            while batch.load:
                for record in batch.advance():
                    if "error" in record:
                        raise ModelError(f"prompt {record['index']} can't be measured: {record['error']}")
                    stats = {**record["stats"], "prefill": record["stats"]["seconds"]["prefill"]}
                    for name in sums:
                        sums[name] += stats[name]
            seconds = time.perf_counter() - start
        prefill = sums.pop("prefill")
        counts: dict[str, Any] = {name: int(value) for name, value in sums.items()}
        return BatchRun(
            batch_size=batch_size,
            length=length,
            block=block,
            prompts=len(jobs),
            seconds=seconds,
            prefill_seconds=prefill,
            **counts,
        )


def measure(
    bench: Bench, jobs: Sequence[Job], sizes: Sequence[int], lengths: Sequence[int], block: int, log: RunLog
) -> Iterator[BatchRun]:
    """Run what the log does not hold yet, append it there, and yield all runs."""
    runs = Resumed(log, BatchRun)
    cells = [(size, length) for size in sizes for length in lengths]
    for number in range(-(-len(jobs) // block)):
        part = jobs[number * block : (number + 1) * block]
        for size, length in in_turn(cells, number * (len(cells) // 3 + 1)):
            key = (size, length, number)
            yield runs.run(key, partial(bench.run, *key, part), key, partial(_warm, bench, size, length, part))


def _warm(bench: Bench, size: int, length: int, jobs: Sequence[Job]) -> None:
    short = [replace(job, options={**job.options, "max_new_tokens": 4}) for job in jobs[:size]]
    bench.run(size, length, -1, short)


def summarise(runs: Sequence[BatchRun], costs: Callable[[int], tuple[Costs, DraftSeconds]]) -> list[Cell]:
    """A cell for each batch size and length, in that order. costs: of passes of so many rows, and of a drafted token."""
    groups: dict[tuple[int, int], list[BatchRun]] = {}
    for run in runs:
        groups.setdefault((run.batch_size, run.length), []).append(run)
    smallest = min(size for size, _ in groups)
    return [_cell(size, length, groups, smallest, costs) for size, length in sorted(groups, key=_order)]


def _order(key: tuple[int, int]) -> tuple[int, bool, int]:
    return key[0], key[1] == AUTO, key[1]


def _cell(
    size: int,
    length: int,
    groups: dict[tuple[int, int], list[BatchRun]],
    smallest: int,
    costs: Callable[[int], tuple[Costs, DraftSeconds]],
) -> Cell:
    mine, plain = groups[size, length], {run.block: run for run in groups.get((size, 0), [])}
    paired = [run for run in mine if run.block in plain]
    total = {name: sum(getattr(run, name) for run in mine) for name in ("tokens", "seconds", "prefill_seconds", "rounds")}
    tested, accepted = sum(run.tested for run in mine), sum(run.accepted for run in mine)
    predicted = None
    if length != AUTO:
        predicted = predicted_rate(size, length, groups[smallest, length], *costs(size))
    return Cell(
        batch_size=size,
        length=length,
        rate=total["tokens"] / total["seconds"],
        decode_rate=total["tokens"] / (total["seconds"] - total["prefill_seconds"]),
        speedup=paired_ratios([run.rate for run in paired], [plain[run.block].rate for run in paired]),
        tokens_per_round=total["tokens"] / total["rounds"],
        acceptance_rate=accepted / tested if tested else None,
        predicted=predicted,
    )


def predicted_rate(size: int, length: int, alone: Sequence[BatchRun], costs: Costs, drafting: DraftSeconds) -> float:
    """Tokens a second of `size` rows. alone: runs of this length in the smallest batch; see the top of this module."""
    rounds = sum(run.rounds for run in alone)
    share = min(1.0, sum(run.drafted for run in alone) / (length * rounds)) if length else 0.0
    wide = share if costs.company == 1 else 1.0 - (1.0 - share) ** size
    seconds = (1.0 - wide) * costs.verify(1) + wide * (drafting.of(length) + costs.verify(length + 1))
    return size * sum(run.tokens for run in alone) / rounds / seconds


def best_length(cells: Sequence[Cell], size: int, predicted: bool) -> int:
    """The fixed length with the most tokens a second in batches of this size."""
    fixed = [cell for cell in cells if cell.batch_size == size and cell.length != AUTO]
    return max(fixed, key=lambda cell: (cell.predicted or 0.0) if predicted else cell.decode_rate).length
