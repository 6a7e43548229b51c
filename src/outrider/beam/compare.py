"""Speculative beam search beside plain beam search on one prompt: the speed-up, and whether the texts agree.

They must, but for rounding: an engine's logits may depend in the last bits on the shape of the pass, so two hypotheses
whose log-probabilities are closer than that may change places. How far the target's arithmetic varies is measured on the
very texts that differ, by scoring them in passes of several widths, instead of being assumed.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property

import torch

from outrider.beam.records import BeamResult, BeamText
from outrider.beam.task import BeamTask
from outrider.models.base import LanguageModel, open_sequence
from outrider.prefill import prefill
from outrider.support.device_data import pad_rows

WIDTHS = (1, 2, 3, 5, 8, 16)


@dataclass(frozen=True)
class Agreement:
    """Two results of one search."""

    speculative: BeamResult
    plain: BeamResult
    task: BeamTask
    model: LanguageModel

    @property
    def speedup(self) -> float:
        """Ratio of the steps per second, reading the prompt left out on both sides."""
        plain = self.plain.stats.steps_per_second
        return self.speculative.stats.steps_per_second / plain if plain > 0 else 0.0

    @property
    def identical(self) -> bool:
        """Whether the same texts came out, in the same order."""
        ours, theirs = self.speculative.sequences, self.plain.sequences
        return [one.tokens for one in ours] == [one.tokens for one in theirs]

    @cached_property
    def gap(self) -> float:
        """The greatest difference of scores at one rank."""
        pairs = zip(self.speculative.sequences, self.plain.sequences, strict=False)
        return max((abs(one.score - other.score) for one, other in pairs), default=0.0)

    @cached_property
    def rounding(self) -> float:
        """By how much the log-probability of one of the texts that differ varies with the width of the passes."""
        pairs = zip(self.speculative.sequences, self.plain.sequences, strict=False)
        parted = [one for pair in pairs if pair[0].tokens != pair[1].tokens for one in pair]
        return max((self._spread(one) for one in parted[:4]), default=0.0)

    def _spread(self, one: BeamText) -> float:
        totals = [logprob(self.model, self.task, one.tokens, width) for width in WIDTHS]
        return max(*totals, one.logprob) - min(*totals, one.logprob)

    @property
    def text(self) -> str:
        """What to say about the texts."""
        if self.identical:
            return f"identical; scores differ by {self.gap:.1g} at most"
        told = (
            f"differ: scores at the same rank by {self.gap:.3g}, the engine's rounding of such a text is {self.rounding:.3g}"
        )
        return told + (
            "; a tie within rounding"
            if self.gap <= self.rounding
            else "; an earlier near-tie can part two searches for good, compare with dtype float64"
        )

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output."""
        return {
            **self.speculative.to_dict(),
            "plain": self.plain.to_dict(),
            "speedup": self.speedup,
            "identical": self.identical,
            "agreement": self.text,
        }


def logprob(model: LanguageModel, task: BeamTask, tokens: Many[int], width: int) -> float:
    """The log-probability of the tokens after the prompt, scored in passes of that many tokens."""
    prompt = task.prompt
    whole, total = [*prompt, *tokens], 0.0
    sequence = open_sequence(model, task.source, len(whole))
    try:
        prefill(model, [sequence], [whole[: len(prompt) - 1]])
        for start in range(len(prompt) - 1, len(whole) - 1, width):
            part = whole[start : min(start + width, len(whole) - 1)]
            padded, lengths = pad_rows([part], model.device)
            logits = model.score([sequence], padded, lengths, "all")
            assert logits is not None
            held = range(start + 1 - len(prompt), start + 1 - len(prompt) + len(part))
            laws = task.law.logprobs(logits[0, : len(part)], [tuple(tokens[:count]) for count in held])
            following = torch.tensor(whole[start + 1 : start + 1 + len(part)], device=laws.device)
            total += float(laws.gather(-1, following.unsqueeze(-1)).double().sum())
    finally:
        sequence.close()
    return total
