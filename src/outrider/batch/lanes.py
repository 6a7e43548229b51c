"""Prompts that are generated side by side, whatever each of them asks for.

Prompts that are sampled alike have a decoder in common, a lane; all lanes share the target's passes (`step_together`).
What a prompt's tokens depend on is its own: its seed, its options, a draft-length policy that starts anew for each row
(where its tokens depend on how much is drafted; else rows learn from each other), and cost tables that hold for the whole
run. Rows that keep it company change nothing but the last bits of the logits, and not even these where the engine's bits do
not depend on the pass (docs/engines.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from typing import Any

from outrider.decode import Decoder, Request, read_together, step_together
from outrider.decode.row import Row, check_request
from outrider.draft_length import DraftLength
from outrider.drafters import Drafter
from outrider.generation import request_for, result_of
from outrider.models.base import TextModel
from outrider.models.cache.prefix_cache import give_prefix_cache, prefix_cache_of
from outrider.models.cache.slots import opening_several
from outrider.prefill import CHUNK
from outrider.records import Round
from outrider.request.options import Options
from outrider.request.own_rules import forces_end, with_own_rules
from outrider.request.prompts import Prepared
from outrider.results import Result
from outrider.settings.sampling import constrains
from outrider.structured import Structure
from outrider.support.clock import PhaseClock
from outrider.support.text import TextTracker

MIB = 2**20
BESIDE = 64  # tokens of prompts that are read between two rounds of others: a few rounds' time on a CPU


@dataclass(eq=False)
class Task:
    """A prompt, and what has become of it. structure: what its text must follow. repeatable: its seed is to give this text
    again, so that nothing that other rows do decides how much is drafted. error: why there is no result; of_all: not by
    anything of its own.
    """

    options: Options
    structure: Structure | None
    request: Request
    tracker: TextTracker
    repeatable: bool = True
    row: Row | None = None
    rounds: list[Round] = field(default_factory=list)
    error: Exception | None = None
    of_all: bool = False
    number: int = field(default_factory=itertools.count().__next__)

    def result(self) -> Result:
        """Of a task that has ended, all that there is."""
        self.tracker.finish()  # here: whoever makes rounds has no time to turn tokens into text
        options, asked = self.options, self.request
        return result_of(self.rounds, self.row, self.tracker, options, options.seeds[0], asked.prompt, asked.source)


@dataclass(frozen=True)
class _Kind:
    """What prompts must have in common to share a decoder. processors: by identity; those of a user's own, which may raise,
    are shared with nobody. rules: what those of an encoder–decoder's config depend on, the tokens that its decoder
    begins with and may write, None if no end is forced; None without one.
    """

    law: tuple[tuple[str, Any], ...]
    processors: tuple[tuple[int | None, int], ...]
    structure: Structure | None
    others: tuple[Any, ...]
    rules: tuple[int, int | None] | None

    @property
    def for_one(self) -> bool:
        """Whether it is one task's alone."""
        return any(number is not None for number, _ in self.processors)

    @classmethod
    def of(cls, task: Task, target: TextModel) -> _Kind:
        """What makes them differ, in a form that can be compared."""
        options, request = task.options, task.request
        law = {**options.sampling.options(), "logit_bias": tuple(sorted(options.sampling.logit_bias.items()))}
        del law["processors"]
        rules = None
        if request.source is not None:
            ends = forces_end(target) and not options.ignore_eos
            rules = len(request.prompt), options.max_new_tokens if ends else None
        return cls(
            tuple(sorted(law.items())),
            tuple((None if constrains(one) else task.number, id(one)) for one in options.sampling.processors),
            task.structure,
            (options.extras, options.lenience, options.alternatives, options.drafter_invariant, task.repeatable),
            rules,
        )


@dataclass
class _Lane:
    """Prompts of a kind, by the numbers of their rows."""

    decoder: Decoder
    tasks: dict[int, Task] = field(default_factory=dict)


class Lanes:
    """Tasks through one model. `admit` takes them in, `step` makes one round of each; `close` frees the sequences.

    rows: how many there may be at a time, which whoever admits sees to. prefix_cache: bytes of what prompts begin with that
    each model keeps, while there are any.
    """

    def __init__(
        self, target: TextModel, drafter: Drafter | None, length: DraftLength, rows: int, prefix_cache: int = 0
    ) -> None:
        self.target, self.drafter, self._length, self._rows = target, drafter, length, rows
        self._clock = PhaseClock(target.device)
        self._shortest_first = True
        self._engines = [target, *(drafter.engines() if drafter is not None else ())]
        self._prefix_cache = prefix_cache
        self.by_kind: dict[_Kind, _Lane] = {}

    def task(
        self,
        prepared: Prepared,
        options: Options,
        structure: Structure | None = None,
        number: int = 0,
        repeatable: bool = True,
    ) -> Task:
        """One for `admit`. number: of its row, by which its randomness differs from that of others with its seed.

        Raises `OutriderError`s for what the model can't be asked.
        """
        tracker = TextTracker(self.target.tokenizer, prepared.tokens, options.stop)
        occasion = self.drafter.occasion() if self.drafter is not None else ()
        request = request_for(self.target, prepared, options, options.seeds[0], number, tracker, occasion)
        check_request(request, self.target)
        if request.source is not None and self.drafter is not None:
            self.drafter.check_source(request.source)
        return Task(options, structure, request, tracker, repeatable)

    def admit(self, tasks: Iterable[Task], read: bool = True) -> list[Task]:
        """Let them join. → those that have ended by that

        read: their prompts, now, while all others wait; if not, `step` reads a part of them each time.
        """
        ended: list[Task] = []
        for model in self._engines:
            if self._prefix_cache and getattr(model, "prefix_cache", None) is None:  # else another batch has it
                give_prefix_cache(model, self._prefix_cache)
        with opening_several():
            for task in tasks:
                ended += self._join(task)
        self._forget_idle()
        if read:
            read_together([lane.decoder for lane in self.by_kind.values()])
            ended += self._ended()
        return ended

    def _join(self, task: Task) -> list[Task]:
        """Let one join. → it, if it can't be let in, and all of its lane, if that can't go on"""
        try:
            kind = _Kind.of(task, self.target)
            lane = self._lane(kind, task)
        except Exception as error:
            task.error = error
            return [task]
        before = len(lane.decoder.rows)
        try:
            (task.row,) = lane.decoder.admit([task.request], read=False)
        except Exception as error:
            if len(lane.decoder.rows) > before:  # half in
                return self._fail(kind, error, [task])
            clear_frames(error.__traceback__)  # the next one may need the memory that they hold
            task.error, task.of_all = error, True  # by the engine
            return [task]
        lane.tasks[task.row.number] = task
        return []

    def step(self) -> list[Task]:
        """One round of every task. → those that have ended, some with an error of their own; what the pass raises, raises"""
        self._shortest_first = not self._shortest_first  # by turns: no long prompt keeps short ones waiting, nor they it
        decoders = [lane.decoder for lane in self.by_kind.values()]
        read_together(decoders, BESIDE if self._going else CHUNK, self._shortest_first)
        ended: list[Task] = []
        lanes = [(kind, lane) for kind, lane in self.by_kind.items() if lane.tasks]
        for (kind, lane), made in zip(lanes, step_together([lane.decoder for _, lane in lanes]), strict=True):
            if isinstance(made, Exception):
                ended += self._fail(kind, made)
                continue
            for number, record in made:
                lane.tasks[number].rounds.append(record)
        return ended + self._ended()

    def _forget_idle(self) -> None:
        """Kinds that nobody can ask for again, and of the others all but the latest: they must not pile up."""
        idle = [kind for kind, lane in self.by_kind.items() if not lane.tasks]
        again = [kind for kind in idle if not kind.for_one]
        for kind in [*(kind for kind in idle if kind.for_one), *again[: -self._rows]]:
            del self.by_kind[kind]

    def _ended(self) -> list[Task]:
        """Let go of the tasks whose rows have ended."""
        ended = []
        for lane in self.by_kind.values():
            over = [row for row in lane.decoder.rows if row.finish_reason is not None]
            for row in over:
                task = lane.tasks.pop(row.number)
                task.error = row.error
                task.of_all = row.error is not None and not row.alone
                ended.append(task)
            if over:
                lane.decoder.dismiss()
        return ended

    @property
    def _going(self) -> bool:
        """Whether any row would wait while prompts are read."""
        return any(lane.decoder.active for lane in self.by_kind.values())

    def drop(self, task: Task) -> None:
        """Let one end before its time."""
        for lane in self.by_kind.values():
            if task.row is not None and lane.tasks.get(task.row.number) is task:
                del lane.tasks[task.row.number]
                try:
                    lane.decoder.end(task.row)
                finally:
                    lane.decoder.dismiss()

    def close(self) -> None:
        """Free all sequences, and give up what is here."""
        lanes = list(self.by_kind.values())
        self.by_kind.clear()
        with ExitStack() as stack:  # every lane is closed, whatever one of them raises
            for model in self._engines:
                if self._prefix_cache and prefix_cache_of(model) is not None:
                    stack.callback(give_prefix_cache, model, 0)
            for lane in lanes:
                stack.callback(lane.decoder.close)

    @property
    def tasks(self) -> list[Task]:
        """All that are here."""
        return [task for lane in self.by_kind.values() for task in lane.tasks.values()]

    def _fail(self, kind: _Kind, error: Exception, joining: Iterable[Task] = ()) -> list[Task]:
        """All of a lane end, since it can't go on."""
        lane = self.by_kind.pop(kind)
        tasks = [*lane.tasks.values(), *joining]
        for task in tasks:
            task.error, task.of_all = error, True
        with suppress(Exception):  # the first error is told
            lane.decoder.close()
        return tasks

    def _lane(self, kind: _Kind, task: Task) -> _Lane:
        """The lane of a kind, the latest of all from now on."""
        if kind in self.by_kind:
            self.by_kind[kind] = self.by_kind.pop(kind)
            return self.by_kind[kind]
        options, target = task.options, self.target
        sampling = options.sampling
        if task.structure is not None:
            sampling = replace(sampling, processors=(*sampling.processors, *task.structure.constraints(target)))
        if kind.rules is not None:
            begins, limit = kind.rules
            sampling = with_own_rules(target, sampling, [range(begins)], limit)
        same_text = (sampling.greedy or options.drafter_invariant) and options.lenience == 1.0
        decoder = Decoder(
            target,
            (),
            sampling,
            self.drafter,
            self._length.together(self._rows) if same_text or not task.repeatable else self._length,
            options.extras,
            lenience=options.lenience,
            alternatives=options.alternatives,
            clock=self._clock,
            failing_alone=True,
        )
        self.by_kind[kind] = _Lane(decoder)
        return self.by_kind[kind]
