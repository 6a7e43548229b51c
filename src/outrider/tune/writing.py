"""What the target writes on the user's prompts, without a draft: by this process, or by the actors of a Ray cluster.

A prompt's text follows from its number and the seed, wherever it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import closing
from dataclasses import replace

from outrider.batch.jobs import Job
from outrider.batch.ray_pool import Cluster, finished, in_order
from outrider.batch.setup import Setup
from outrider.generation import generate
from outrider.models.base import TextModel, has_encoder
from outrider.request.prompts import Asked
from outrider.sampling import SamplingSettings


def own_texts(
    target: TextModel, prompts: Many[Asked], sampling: SamplingSettings, tokens: int, seed: int
) -> Iterator[list[int]]:
    """The new tokens of every prompt, in order; ends of text are ignored, but for answers to a source."""
    for number, prompt in enumerate(prompts):
        options = {**sampling.options(), "max_new_tokens": tokens, "ignore_eos": not has_encoder(target)}
        yield list(generate(target, prompt, draft=None, seed=seed + number, **options).tokens)


def spread_texts(
    target: TextModel,
    cluster: Cluster,
    setup: Setup,
    prompts: Many[Asked],
    sampling: SamplingSettings,
    tokens: int,
    seed: int,
) -> Iterator[list[int]]:
    """The same by actors, each with one prompt at a time, as one process has. setup: the target's; its draft is left out."""
    options = {name: value for name, value in sampling.options().items() if name != "processors"}
    options |= {"max_new_tokens": tokens, "ignore_eos": not has_encoder(target), "seed": seed}
    alone = replace(setup, draft=(), num_draft_tokens=0, batch_size=1, chat=False, defaults=options)
    jobs = (Job(number, prompt, {"seed": seed + number}) for number, prompt in enumerate(prompts))
    with closing(finished(cluster, alone, jobs, lambda one: f"prompt {one['index']} could not be written on")) as records:
        for record in in_order(records):
            yield record["tokens"]
