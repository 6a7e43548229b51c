"""A continuous batch: a finished row's place is taken by the next prompt at once.

What a prompt's tokens depend on is its own: the seed and its index, its options, a draft-length policy that starts anew for
each row (where its tokens depend on how much is drafted; else rows learn from each other), and cost tables that hold for
the whole run. Rows that keep it company change nothing but the last bits of the logits, and not even these where the
engine's bits do not depend on the pass (docs/engines.md).

Rows that sample alike share their passes. A line with another temperature is in the batch, too, but in passes of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.batch.jobs import LAW, Job, options_of, structure_of
from outrider.batch.setup import Ready
from outrider.decode import Decoder, Request
from outrider.decode.row import Row
from outrider.errors import NumericalError, OutriderError
from outrider.generation import request_for
from outrider.models.base import TextModel
from outrider.records import Round
from outrider.request.options import Options
from outrider.request.own_rules import forces_end, with_own_rules
from outrider.request.prompts import prepare, source_length
from outrider.results import Result
from outrider.structured import Structure
from outrider.support.checks import check_count
from outrider.support.text import TextTracker

Record = dict[str, Any]
"""A finished prompt, as it is written: index, what the line handed on, and the result or an error."""


@dataclass
class _Place:
    """A prompt in the batch."""

    job: Job
    seed: int
    tracker: TextTracker
    row: Row
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class _Kind:
    """What prompts must have in common to share passes. law: values of `LAW`. rules: what those of an encoder–decoder's
    config depend on, the tokens that its decoder begins with and may write, None if no end is forced; None without one.
    """

    law: tuple[Any, ...]
    structure: Structure | None
    logprobs: bool
    rules: tuple[int, int | None] | None

    @classmethod
    def of(cls, options: Options, structure: Structure | None, target: TextModel, request: Request) -> _Kind:
        """What makes them differ, in a form that can be compared."""
        law = {**options.sampling.options(), "logit_bias": tuple(sorted(options.sampling.logit_bias.items()))}
        rules = None
        if request.source is not None:
            ends = forces_end(target) and not options.ignore_eos
            rules = len(request.prompt), options.max_new_tokens if ends else None
        return cls(tuple(law[name] for name in LAW), structure, options.extras.logprobs, rules)


@dataclass
class _Lane:
    """Prompts of a kind: they share a decoder."""

    decoder: Decoder
    places: dict[int, _Place] = field(default_factory=dict)


class ContinuousBatch:
    """Prompts through one model, `batch_size` of them side by side.

    `put` takes prompts, of which those that find no place wait; `advance` makes one round of every row and returns what has
    ended. Use it as a context manager: it frees the sequences.
    """

    def __init__(self, ready: Ready, batch_size: int) -> None:
        check_count("batch_size", batch_size)
        self.batch_size = batch_size
        self._ready = ready
        self._waiting: deque[Job] = deque()
        self._lanes: dict[_Kind, _Lane] = {}
        self._failed: list[Record] = []

    def __enter__(self) -> ContinuousBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def load(self) -> int:
        """Prompts that are here, those that wait included."""
        return len(self._waiting) + self._busy

    @property
    def _busy(self) -> int:
        return sum(len(lane.places) for lane in self._lanes.values())

    def put(self, jobs: Iterable[Job]) -> None:
        """Take prompts; they join before the next round, as far as there is room."""
        self._waiting.extend(jobs)

    def advance(self) -> list[Record]:
        """One round of every row. → what has ended, in no particular order"""
        self._fill()
        ended, self._failed = self._failed, []
        for key, lane in list(self._lanes.items()):
            try:
                ended += self._step(key, lane)
            except NumericalError:
                ended += self._one_by_one(key, lane)
        return ended

    def close(self) -> None:
        """Free all sequences; prompts in the batch are given up."""
        for lane in self._lanes.values():
            lane.decoder.close()
        self._lanes.clear()
        self._waiting.clear()

    def _fill(self) -> None:
        """Give every free place to a waiting prompt, and read the prompts that join the same rows together."""
        joining: dict[_Kind, list[tuple[Job, Options, Request, TextTracker]]] = {}
        free = self.batch_size - self._busy
        while free > 0 and self._waiting:
            job = self._waiting.popleft()
            try:
                options = options_of(job, self._ready.defaults)
                request, tracker = self._request(job, options)
                key = _Kind.of(options, structure_of(job, self._ready.defaults), self._ready.target, request)
                self._lane(key, options).decoder.check(request)
            except OutriderError as error:
                self._failed.append(_error(job, error))
                continue
            joining.setdefault(key, []).append((job, options, request, tracker))
            free -= 1
        for key, new in joining.items():
            lane = self._lanes[key]
            rows = lane.decoder.admit([request for _, _, request, _ in new])
            for (job, options, _, tracker), row in zip(new, rows, strict=True):
                lane.places[row.number] = _Place(job, options.seeds[0], tracker, row)
        for idle in [key for key, lane in self._lanes.items() if not lane.places][: -self.batch_size]:
            del self._lanes[idle]  # lines that all sample otherwise must not pile up; the latest may be asked for again

    def _lane(self, key: _Kind, options: Options) -> _Lane:
        """The lane of a kind, the latest of all from now on."""
        if key in self._lanes:
            self._lanes[key] = self._lanes.pop(key)
        else:
            ready = self._ready
            constraints = () if key.structure is None else key.structure.constraints(ready.target)
            sampling = replace(options.sampling, processors=constraints)
            if key.rules is not None:
                begins, limit = key.rules
                sampling = with_own_rules(ready.target, sampling, [range(begins)], limit)
            same_text = (options.sampling.greedy or options.drafter_invariant) and options.lenience == 1.0
            decoder = Decoder(
                ready.target,
                (),
                sampling,
                ready.drafter,
                ready.length.together(self.batch_size) if same_text else ready.length,
                options.extras,
                lenience=options.lenience,
                alternatives=options.alternatives,
            )
            self._lanes[key] = _Lane(decoder)
        return self._lanes[key]

    def _request(self, job: Job, options: Options) -> tuple[Request, TextTracker]:
        target = self._ready.target
        prepared = prepare(target, self._ready.as_prompt(job.prompt))
        tracker = TextTracker(target.tokenizer, prepared.tokens, options.stop)
        seed = options.seeds[0]
        # A seed of the line's own gives what `outrider generate --seed` gives; the command's is spread over the prompts.
        row = 0 if "seed" in job.options else job.index
        # The same for all parts of a run: drafts of a batch remember nothing (`Setup.drafter`).
        occasion = self._ready.drafter.occasion() if self._ready.drafter is not None else ()
        return request_for(target, prepared, options, seed, row, tracker, occasion), tracker

    def _step(self, key: _Kind, lane: _Lane) -> list[Record]:
        ended = []
        for number, record in lane.decoder.step():
            place = lane.places[number]
            place.rounds.append(record)
            if record.finish_reason is not None:
                ended.append(_record(lane.places.pop(number), self._ready, key.logprobs))
        if ended:
            lane.decoder.dismiss()
        return ended

    def _one_by_one(self, key: _Kind, lane: _Lane) -> list[Record]:
        """A row without a law has stopped its lane: each of the lane's prompts again from its beginning, alone.

        What a prompt gives does not depend on its company, so nothing is lost but time, and only the culprit fails.
        """
        ended: list[Record] = []
        jobs = [place.job for place in lane.places.values()]
        del self._lanes[key]
        lane.decoder.close()
        for job in jobs:
            options = options_of(job, self._ready.defaults)
            alone = self._lane(key, options)
            try:
                request, tracker = self._request(job, options)
                (row,) = alone.decoder.admit([request])
                alone.places[row.number] = _Place(job, options.seeds[0], tracker, row)
                while alone.places:
                    ended += self._step(key, alone)
            except NumericalError as error:
                ended.append(_error(job, error))
            finally:
                del self._lanes[key]
                alone.decoder.close()
        return ended


def _record(place: _Place, ready: Ready, logprobs: bool) -> Record:
    place.tracker.finish()
    result = Result.of_rounds(
        place.rounds,
        place.row.prefill_seconds,
        logprobs=logprobs,
        text=place.tracker.text,
        finish_reason=place.rounds[-1].finish_reason or "cancelled",
        seed=place.seed,
        prompt_tokens=place.row.draft.prompt_length,
        source_tokens=source_length(place.row.draft.source),
        lenience=ready.defaults.get("lenience", 1.0),
        drafter_invariant=ready.defaults.get("drafter_invariant", False),
    )
    record = {"index": place.job.index, **place.job.passed, **result.to_dict()}
    if ready.rounds:
        record["rounds"] = [made.counts for made in place.rounds]
    return record


def _error(job: Job, error: OutriderError) -> Record:
    return {"index": job.index, **job.passed, "error": str(error)}
