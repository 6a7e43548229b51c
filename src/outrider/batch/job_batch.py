"""The lines of a file through one model: a finished row's place is taken by the next prompt at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from outrider.batch.jobs import Job, options_of, structure_of
from outrider.batch.lanes import MIB, Lanes, Task
from outrider.batch.setup import Ready
from outrider.errors import OutriderError, in_one_line
from outrider.request.prompts import prepare
from outrider.support.checks import check_count

Record = dict[str, Any]
"""A finished prompt, as it is written: index, what the line handed on, and the result or an error."""


class JobBatch:
    """Prompts through one model, `batch_size` of them side by side.

    `put` takes prompts, of which those that find no place wait; `advance` makes one round of every row and returns what has
    ended. Use it as a context manager: it frees the sequences.
    """

    def __init__(self, ready: Ready, batch_size: int) -> None:
        check_count("batch_size", batch_size)
        self.batch_size = batch_size
        self._ready = ready
        self._waiting: deque[Job] = deque()
        self._lanes = Lanes(ready.target, ready.drafter, ready.length, batch_size, ready.prefix_cache * MIB)
        self._jobs: dict[Task, Job] = {}
        self._ended: list[Record] = []

    def __enter__(self) -> JobBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def load(self) -> int:
        """Prompts that are here, those that wait included."""
        return len(self._waiting) + len(self._jobs)

    def put(self, jobs: Iterable[Job]) -> None:
        """Take prompts; they join before the next round, as far as there is room."""
        self._waiting.extend(jobs)

    def advance(self) -> list[Record]:
        """One round of every row. → what has ended, in no particular order"""
        self._fill()
        self._note(self._lanes.step())
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Free all sequences; prompts in the batch are given up."""
        self._lanes.close()
        self._jobs.clear()
        self._waiting.clear()

    def _fill(self) -> None:
        """Give every free place to a waiting prompt."""
        joining: list[Task] = []
        while self._waiting and len(self._jobs) < self.batch_size:
            job = self._waiting.popleft()
            try:
                task = self._task(job)
            except OutriderError as error:
                self._ended.append(_error(job, error))
                continue
            self._jobs[task] = job
            joining.append(task)
        self._note(self._lanes.admit(joining))

    def _task(self, job: Job) -> Task:
        ready = self._ready
        options = options_of(job, ready.defaults)
        # A seed of the line's own gives what `outrider generate --seed` gives; the command's is spread over the prompts.
        number = 0 if "seed" in job.options else job.index
        prepared = prepare(ready.target, ready.as_prompt(job.prompt))
        return self._lanes.task(prepared, options, structure_of(job, ready.defaults), number)

    def _note(self, ended: Iterable[Task]) -> None:
        for task in ended:
            job = self._jobs.pop(task)
            if task.error is None:
                self._ended.append(self._record(job, task))
            elif not task.of_all and (isinstance(task.error, OutriderError) or task.row is not None):
                self._ended.append(_error(job, task.error))
            else:
                raise task.error

    def _record(self, job: Job, task: Task) -> Record:
        record = {"index": job.index, **job.passed, **task.result().to_dict()}
        if self._ready.rounds:
            record["rounds"] = [made.counts for made in task.rounds]
        return record


def _error(job: Job, error: Exception) -> Record:
    said = str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {in_one_line(error)}"
    return {"index": job.index, **job.passed, "error": said}
