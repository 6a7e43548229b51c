"""Our own texts, written by the actors of a Ray cluster: those that `sources.own_texts` writes, in the same order. With an
adaptive length above temperature 0 they are others of the same law: there rows learn from each other in one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from outrider.audit.inputs import PROMPTS
from outrider.audit.sources import ROWS, longest_text, plan_group, read_rounds, text_of
from outrider.audit.text import Text
from outrider.batch.jobs import LAW, Job
from outrider.batch.ray_pool import Cluster, finished, in_order
from outrider.batch.setup import Setup
from outrider.models.base import TextModel
from outrider.request.prompts import Prompt, asked
from outrider.sampling import SamplingSettings


def spread_texts(
    cluster: Cluster,
    setup: Setup,
    target: TextModel,
    sampling: SamplingSettings,
    tokens: int,
    seed: int,
    done: int,
    prompts: Sequence[Prompt] = PROMPTS,
) -> Iterator[Text]:
    """Texts until they hold `tokens` new tokens or more. setup: with `rounds`; `sampling` is laid over its defaults.

    done: texts made before, after which the prompts and seeds go on.
    """
    law = {name: getattr(sampling, name) for name in LAW}
    setup = replace(setup, chat=False, defaults={**setup.defaults, **law, "seed": 0, "ignore_eos": True})
    longest = longest_text(sampling, tokens, prompts)
    made = 0
    while made < tokens:
        before, jobs = made, _jobs(target, sampling, tokens - made, longest, seed, done, prompts)
        with closing(finished(cluster, setup, jobs, lambda one: f"text {one['index']} could not be written")) as records:
            for record in in_order(records, done):
                read = asked(target, prompts[done % len(prompts)])
                made += len(record["tokens"])
                done += 1
                yield text_of(target, read, record["tokens"], read_rounds(record["rounds"], record["tokens"]))
        if made == before:
            return  # no further texts are to be had


def _jobs(
    target: TextModel,
    sampling: SamplingSettings,
    tokens: int,
    longest: int,
    seed: int,
    done: int,
    prompts: Sequence[Prompt],
) -> Iterator[Job]:
    """Texts that hold so many tokens, if none of them ends early."""
    planned = 0
    while group := plan_group(sampling, tokens - planned, longest, seed, done, prompts):
        for one in group:
            options = {"max_new_tokens": one.max_new_tokens, "seed": one.seed}
            yield Job(one.number, asked(target, one.prompt), options)
        planned += ROWS * group[0].max_new_tokens
        done += ROWS
