"""What drafting without a model costs: microseconds a token for tables and copies, at a long context."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from outrider.bench.statistics import Spread, spread
from outrider.draft_length import SimplePlan
from outrider.drafters import Drafter, NgramDrafter, PromptLookupDrafter, SuffixDrafter
from outrider.drafters.base import DraftContext
from outrider.models.table import TableModel, TableSequence
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.support.clock import PhaseClock

VOCABULARY = 151_936
DRAFTED = 8
ROUNDS = 400


def measure(context: int, table: Path | None = None) -> dict[str, dict[str, Spread | float]]:
    """{drafter: {"read": microseconds a context token, once, "round": a round's bookkeeping and a proposal, per token}}."""
    tokens = text_like(context + 4 * ROUNDS)
    drafters: dict[str, Drafter] = {"prompt-lookup": PromptLookupDrafter(), "suffix": SuffixDrafter()}
    if table is not None:
        drafters["n-gram"] = NgramDrafter(table)
    found = {name: _measure(drafter, tokens, context) for name, drafter in drafters.items()}
    if table is not None:  # the law over the vocabulary is written out for each token then
        found["n-gram, sampled"] = _measure(drafters["n-gram"], tokens, context, SamplingSettings(temperature=1.0), 40)
    return found


def text_like(count: int) -> list[int]:
    """Token ids with the repetitions of text: Zipf's law, and every now and then a copy of an earlier stretch."""
    generator = np.random.default_rng(0)
    ids = np.minimum(generator.zipf(1.3, count), VOCABULARY - 1)
    for at in range(2000, count - 40, 97):
        source = int(generator.integers(0, at - 40))
        length = int(generator.integers(2, 40))
        ids[at : at + length] = ids[source : source + length]
    return ids.tolist()  # type: ignore[no-any-return]


def _measure(
    drafter: Drafter, tokens: list[int], context: int, sampling: SamplingSettings | None = None, rounds: int = ROUNDS
) -> dict[str, Spread | float]:
    """sampling: greedy if none is given."""
    row = DraftRow(tokens[:context], context, RandomStream(0), TableSequence())
    model = TableModel(torch.ones(1), name="none")
    about = DraftContext(sampling or SamplingSettings(), model, VOCABULARY, PhaseClock())
    drafter.begin([row], about)
    read = _seconds(lambda: drafter.prospects(row))
    times = []
    for i in range(rounds):
        row.tokens += tokens[context + 4 * i : context + 4 * i + 4]

        def step() -> None:
            drafter.prospects(row)
            drafter.propose([row], [SimplePlan(limit=DRAFTED)], about)

        times.append(1e6 * _seconds(step) / DRAFTED)
    return {"read": 1e6 * read / context, "round": spread(times)}


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
