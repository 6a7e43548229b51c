"""A drafter of each kind for tables of three tokens, and draft lengths."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SelfDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
)
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.samples import V
from tests.helpers.toys import PROMPT, SETTINGS, table

COSTS = Costs({1: 1.0, 2: 1.1, 5: 1.4})


def speculative(depth: int, inner: int = 2) -> Drafter:
    """Draft models of different laws, each accelerated by the next; the last one copies or drafts plainly."""
    drafter: Drafter = ModelDrafter(table(30, V), step_seconds=0.1)
    for level in range(depth):
        drafter = SpeculativeDrafter(table(31 + level, V), drafter, FixedLength(inner), step_seconds=0.2)
    return drafter


def holed() -> TableModel:
    """A draft model without any law after the token 1."""
    return TableModel(
        torch.stack([table(2, V).probs_after([0, a, b]) * (b != 1) for a in range(V) for b in range(V)]).view(V, V, V)
    )


def reader_of_earlier_texts() -> SuffixDrafter:
    """A suffix drafter that has met texts of the target before."""
    drafter = SuffixDrafter(memory=True)
    earlier = [Request(PROMPT, 60, RandomStream(9, i)) for i in range(3)]
    decode(table(1, V), earlier, SETTINGS["temperature 1"], drafter, FixedLength(3))
    return drafter


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "random": RandomDrafter,
    "prompt lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
    "suffix with a memory": reader_of_earlier_texts,
    "self": SelfDrafter,
    "self, its own sampling": lambda: SelfDrafter(temperature=0.5, top_k=2),
    "model, greedy": lambda: ModelDrafter(table(2, V), SamplingSettings(), 0.3),
    "model without a law in places": lambda: ModelDrafter(holed(), step_seconds=0.3),
    "model, its own sampling": lambda: ModelDrafter(table(2, V), SamplingSettings(temperature=0.5, top_k=2), 0.3),
    "speculative, depth 2": lambda: speculative(1),
    "speculative, depth 3": lambda: speculative(2),
    "speculative, copying": lambda: SpeculativeDrafter(table(2, V), PromptLookupDrafter(), FixedLength(3), step_seconds=0.2),
    "speculative, nothing inside": lambda: SpeculativeDrafter(
        table(2, V), RandomDrafter(), FixedLength(0), step_seconds=0.2
    ),
    "choice": lambda: ChoiceDrafter([ModelDrafter(table(2, V), step_seconds=0.3), PromptLookupDrafter(), RandomDrafter()]),
    "choice of speculative": lambda: ChoiceDrafter([speculative(1), PromptLookupDrafter()]),
    "speculative over a choice": lambda: SpeculativeDrafter(
        table(2, V),
        ChoiceDrafter([PromptLookupDrafter(), ModelDrafter(table(3, V), step_seconds=0.1)]),
        AdaptiveLength(COSTS, longest=3),
        step_seconds=0.2,
    ),
}
LENGTHS: dict[str, DraftLength] = {"fixed": FixedLength(3), "adaptive": AdaptiveLength(COSTS, longest=4, probe_share=0.3)}
