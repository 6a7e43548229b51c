"""The answers of `answers.measure` by the actors of a Ray cluster: one prompt at a time on each, so that its times are those
of a device by itself.

Prompts, seeds and answers are those of one process. What is lost is the turns: each way of drafting answers everything
before the next one loads its models, so ratios of times are fair only where every actor has a device of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from outrider.batch.jobs import Job
from outrider.batch.ray_pool import Cluster, finished
from outrider.batch.setup import Setup
from outrider.bench.answers import AnswerRun, Drafting, Plan, make_run, seed_of
from outrider.bench.asking import prompt_tokens, stops
from outrider.bench.examples import Example
from outrider.bench.quality import Metric
from outrider.bench.resumed import Resumed
from outrider.bench.settings import Setting
from outrider.models.base import TextModel
from outrider.support.run_log import RunLog

_Asked = tuple[Example, Setting, int]


def measure_spread(
    cluster: Cluster,
    setup: Setup,
    target: TextModel,
    draftings: Sequence[tuple[Drafting, str | None]],
    plan: Plan,
    metric: Metric | None,
    log: RunLog,
) -> Iterator[AnswerRun]:
    """Run what the log does not hold yet, append it there, and yield all runs. draftings: with their specifications."""
    runs = Resumed(log, AnswerRun)
    asked = [(e, s, n) for e in plan.examples for s in plan.settings for n in range(plan.samples_of(s))]
    for drafting, spec in draftings:
        missing: dict[int, _Asked] = {}
        for index, (example, setting, sample) in enumerate(asked):
            held = runs.held((example.name, example.digest, sample, setting.name, drafting.name))
            if held is None:
                missing[index] = (example, setting, sample)
            else:
                yield held
        if missing:
            own = replace(setup, draft=() if spec is None else (spec,), num_draft_tokens=drafting.length, batch_size=1)
            yield from _answers(cluster, own, target, drafting.name, missing, plan, metric, runs)


def _answers(
    cluster: Cluster,
    setup: Setup,
    target: TextModel,
    drafting: str,
    missing: Mapping[int, _Asked],
    plan: Plan,
    metric: Metric | None,
    runs: Resumed[AnswerRun],
) -> Iterator[AnswerRun]:
    """One way of drafting."""

    def jobs() -> Iterator[Job]:
        for index, (example, setting, sample) in missing.items():
            prompt = prompt_tokens(target, plan.kind, example)
            options: dict[str, Any] = {"max_new_tokens": plan.max_new_tokens}
            options |= {"temperature": setting.temperature, "top_p": setting.top_p}
            options |= {"seed": seed_of(example, sample), "stop": stops(target, plan.kind, example)}
            yield Job(index, prompt, options, {"metadata": prompt})

    def failed(record: Mapping[str, Any]) -> str:
        return f"{missing[record['index']][0].name} could not be answered"

    with closing(finished(cluster, setup, jobs(), failed)) as records:
        for record in records:
            example, setting, sample = missing[record["index"]]
            run = make_run(drafting, example, setting, sample, record["metadata"], record, metric)
            yield runs.keep(run.key, run)
