"""Running a batch: prompts in, finished ones out, here or on Ray, and what it comes to."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from outrider.batch.job_batch import JobBatch, Record
from outrider.batch.jobs import Job
from outrider.batch.setup import Setup

KeepTables = Callable[[Mapping[str, Any]], None]


class Executor(Protocol):
    """Computes jobs, in any order. tables: the run's cost tables, if it has them; `keep` gets them once they are known."""

    def __call__(self, setup: Setup, jobs: Iterator[Job], tables: Mapping[str, Any], keep: KeepTables) -> Generator[Record]:
        """The finished prompts; jobs are taken from the iterator only as there is room for them."""


def run_here(setup: Setup, jobs: Iterator[Job], tables: Mapping[str, Any], keep: KeepTables) -> Generator[Record]:
    """In this process."""
    ready = setup.load(tables)
    keep(ready.tables)
    with JobBatch(ready, setup.batch_size) as batch:
        while True:
            batch.put(islice(jobs, setup.batch_size - batch.load))
            if not batch.load:
                return
            yield from batch.advance()


@dataclass
class Tally:
    """What was computed since the start."""

    started: float = field(default_factory=time.perf_counter)
    prompts: int = 0
    errors: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these

    def begin(self) -> None:
        """Start the clock again, once the models are loaded."""
        self.started = time.perf_counter()

    def add(self, record: Record) -> None:
        """Count a finished prompt."""
        self.prompts += 1
        self.errors += "error" in record
        for names, found in (
            (("tokens", "rounds", "drafted", "accepted", "tested"), record.get("stats", {})),
            (("prompt_tokens", "cached_tokens"), record),
        ):
            for name in names:
                setattr(self, name, getattr(self, name) + found.get(name, 0))

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output. tokens_per_second: over wall time, reading the prompts included, loading not."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "acceptance_rate": self.accepted / self.tested if self.tested else None,
            "mean_acceptance_length": self.tokens / self.rounds if self.rounds else None,
        }
