"""The parts of the sampling law that depend on the tokens before a position: penalties and logits processors.

Contexts are given per position, so that inside a draft each position sees the drafted tokens before it, exactly as plain
decoding would see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.errors import ParameterError
from outrider.settings.sampling import KeepsState, LogitsProcessor, SamplingSettings
from outrider.support.device_data import index

State = Literal["certain", "drafted", "unused"]


@dataclass(frozen=True)
class Context:
    """The tokens before one position. tokens: int64 [T] on the model's device; the first `prompt_length` are prompt.

    state: "drafted" if the context is that of the row before plus a drafted token; "unused" if the position only fills up a
    batch. drafted: how many of the last tokens may not be kept. ends: tokens that would end the text.
    """

    tokens: Tensor
    prompt_length: int
    state: State = "certain"
    drafted: int = 0
    ends: frozenset[int] = frozenset()

    def is_behind_an_end(self) -> bool:
        """Whether a drafted token ends the text before this position, which plain decoding never reaches. Reads back."""
        if not self.ends or not self.drafted:
            return False
        return not self.ends.isdisjoint(self.tokens[-self.drafted :].tolist())


def apply_penalties(logits: Tensor, contexts: Sequence[Context], settings: SamplingSettings) -> Tensor:
    """Repetition, frequency and presence penalties at all positions at once. [N, V], N contexts → [N, V]"""
    repetition, frequency, presence = settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty
    if repetition == 1.0 and not frequency and not presence:
        return logits
    if not contexts:
        return logits
    tokens = pad_sequence([context.tokens for context in contexts], batch_first=True)
    lengths = [0 if context.state == "unused" else len(context.tokens) for context in contexts]
    ends = index(lengths, logits.device).unsqueeze(1)
    place = torch.arange(tokens.shape[1], device=logits.device)
    there = place < ends
    first = tokens[:, :1].where(ends > 0, 0)
    known = torch.where(there, tokens, first)  # a token that comes twice is written the same value twice
    if repetition != 1.0:
        seen = logits.gather(1, known)
        changed = torch.where(seen < 0, seen * repetition, seen / repetition)
        logits = logits.scatter(1, known, torch.where(ends > 0, changed, seen))
    if frequency or presence:
        starts = index([context.prompt_length for context in contexts], logits.device).unsqueeze(1)
        output = (there & (place >= starts)).to(logits.dtype)
        counts = torch.zeros_like(logits).scatter_add_(1, known, output).gather(1, known)
        # Of these tokens alone: whole rows of a large vocabulary would take several times as long.
        logits = logits.scatter(1, known, logits.gather(1, known) - frequency * counts - presence * (counts > 0))
    return logits


def apply_processors(logits: Tensor, tokens: Tensor, prompt_length: int, processors: Sequence[LogitsProcessor]) -> Tensor:
    """Processors at one position, in turn. logits [V], tokens int64 [T] before it, the first of them the prompt's → [V]"""
    for processor in processors:
        if isinstance(processor, KeepsState):
            logits = processor.apply(tokens, prompt_length, logits)
            continue
        # A copy: many processors write into what they are given, and it is a view of the model's own logits.
        scores = processor(tokens.unsqueeze(0), logits.unsqueeze(0).clone())
        shape = list(scores.shape) if isinstance(scores, Tensor) else None
        if shape != [1, logits.shape[0]]:
            wanted, gave = f"[1, {logits.shape[0]}]", type(scores).__name__ if shape is None else shape
            raise ParameterError(f"processors must return scores {wanted}, {processor} gave {gave}")
        logits = scores[0].to(logits.dtype)
    return logits
