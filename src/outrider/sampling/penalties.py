"""The parts of the sampling law that depend on the tokens before a position: penalties and logits processors.

Contexts are given per position, so that inside a draft each position sees the drafted tokens before it, exactly as plain
decoding would see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.sampling.settings import SamplingSettings
from outrider.sampling.stateful import Constraint, StatefulProcessor

State = Literal["certain", "drafted", "unused"]


@dataclass(frozen=True)
class Context:
    """The tokens before one position. tokens: int64 [T] on the model's device; the first `prompt_length` are prompt.

    state: "drafted" if the context is that of the row before plus a drafted token; "unused" if the position only fills up a
    batch.
    """

    tokens: Tensor
    prompt_length: int
    state: State = "certain"


def apply_context(logits: Tensor, context: Context, settings: SamplingSettings) -> Tensor:
    """Penalties, then the processors, at one position. logits [V] → [V]"""
    tokens = context.tokens
    if settings.repetition_penalty != 1.0:
        seen = logits[tokens]
        penalty = settings.repetition_penalty
        logits = logits.scatter(0, tokens, torch.where(seen < 0, seen * penalty, seen / penalty))
    output = tokens[context.prompt_length :]
    if settings.presence_penalty or settings.frequency_penalty:
        counts = torch.zeros_like(logits).scatter_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
        logits = logits - settings.frequency_penalty * counts - settings.presence_penalty * (counts > 0)
    for processor in settings.processors:
        if isinstance(processor, Constraint):
            logits = processor.apply(output.tolist(), logits)
            continue
        if isinstance(processor, StatefulProcessor):
            logits = processor.apply(tokens, context.prompt_length, logits).to(logits.dtype)
            continue
        # A copy: many processors write into what they are given, and it is a view of the model's own logits.
        scores = processor(tokens.unsqueeze(0), logits.unsqueeze(0).clone())
        if scores.shape != (1, logits.shape[0]):
            wanted = f"[1, {logits.shape[0]}]"
            raise ParameterError(f"processors must return scores {wanted}, {processor} gave {list(scores.shape)}")
        logits = scores[0].to(logits.dtype)
    return logits
