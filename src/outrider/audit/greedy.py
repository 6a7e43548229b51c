"""Two greedy outputs that differ: a tie within the engine's rounding, or a bug?

At temperature 0 speculative and plain decoding must give the same tokens, unless two logits are closer than what the
engine's own arithmetic varies by when it scores a different number of tokens at once. That variation is measured here, at
the position in question, instead of being assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.base import LanguageModel, Source, open_sequence
from outrider.prefill import prefill
from outrider.support.device_data import pad_rows

WIDTHS = (1, 2, 3, 5, 9, 16)
PASSES = 8  # of each width
ROUNDING = 1.0  # the most that is called so, of the spread of logits


@dataclass(frozen=True)
class Divergence:
    """Where two outputs part.

    position: index into the new tokens. first, second: the two tokens there. gap: |logit(first) - logit(second)|, the
    least over the ways of scoring. rounding: the most by which that difference varies between those ways, and no less than
    what the numbers that logits are given in can tell apart there (bfloat16: an eighth between 16 and 32). spread: of the
    logits there, their standard deviation.
    """

    position: int
    first: int
    second: int
    gap: float
    rounding: float
    spread: float

    @property
    def rounds(self) -> bool:
        """Whether passes of different widths differ by as much as rounding may: else they do not compute the same."""
        return self.rounding <= ROUNDING * self.spread

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.rounds and self.gap <= self.rounding

    def __str__(self) -> str:
        verdict = "a tie within rounding" if self.near_tie else "NOT a tie: please report this"
        if not self.rounds:
            verdict = f"too much for rounding, since logits spread by {self.spread:.3g}: please report this"
        return (
            f"differ from token {self.position} on ({self.first} or {self.second}): their logits are {self.gap:.3g} apart, "
            f"the engine's rounding is {self.rounding:.3g} there; {verdict}"
        )


def first_divergence(
    target: LanguageModel,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    source: Source | None = None,
) -> Divergence | None:
    """Compare two greedy continuations of `prompt` by the bare logits; None if one is a prefix of the other."""
    parted = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    position = next(parted, None)
    if position is None:
        return None
    a, b = first[position], second[position]
    scores = logits_by_width(target, [*prompt, *first[:position]], source)
    margins = scores[:, a].double() - scores[:, b].double()
    smallest = 0.0 if bool((margins > 0).any() and (margins < 0).any()) else float(margins.abs().min())
    rounding = max(float(margins.max() - margins.min()), last_place(scores[:, [a, b]]))
    finite = scores[scores.isfinite()].double()
    return Divergence(position, a, b, smallest, rounding, float(finite.std()))


def last_place(numbers: Tensor) -> float:
    """The step from the largest of these to the next number of their type."""
    largest = float(numbers.abs().max())
    if not 0.0 < largest < math.inf:
        return 0.0
    return math.ldexp(torch.finfo(numbers.dtype).eps, math.frexp(largest)[1] - 1)


def logits_by_width(target: LanguageModel, tokens: Sequence[int], source: Source | None = None) -> Tensor:
    """The logits after `tokens`, the last of them scored in passes of 1, 2, 3, … tokens. [ways, V]

    Several passes each, since what the cache holds was rounded by the passes that wrote it, too.
    """
    rows = []
    for width in WIDTHS:
        if width > len(tokens):
            break
        sequence = open_sequence(target, source, len(tokens))
        try:
            first = len(tokens) - width * min(PASSES, len(tokens) // width)
            prefill(target, [sequence], [list(tokens[:first])])
            logits = None
            for start in range(first, len(tokens), width):
                padded, lengths = pad_rows([list(tokens[start : start + width])], target.device)
                logits = target.score([sequence], padded, lengths, "last")
            assert logits is not None
            rows.append(logits[0, 0].cpu().clone())
        finally:
            sequence.close()
    return torch.stack(rows)
