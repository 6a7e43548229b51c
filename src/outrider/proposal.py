"""What a drafter is shown of a sequence, and what it proposes for a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.models.base import Sequence, Source
from outrider.randomness import RandomStream


@dataclass
class DraftRow:
    """One sequence as its drafter sees it.

    tokens: prompt and output so far (shared with the decoder, never changed here). stream: the row's randomness, from
    which every draw takes fresh numbers. sequence: the target's own. state: the drafter's. uncertain: how many of the last
    tokens may be taken back, inside a drafter that is itself a speculative decoder. source: what the target's encoder read.
    """

    tokens: list[int]
    prompt_length: int
    stream: RandomStream
    sequence: Sequence
    state: Any = None
    uncertain: int = 0
    source: Source | None = None

    @property
    def certain(self) -> int:
        """How many of the tokens stay for good."""
        return len(self.tokens) - self.uncertain

    @property
    def source_tokens(self) -> list[int]:
        """The source, as far as it is text."""
        return [] if self.source is None or isinstance(self.source, Tensor) else list(self.source)

    @property
    def reading(self) -> list[int]:
        """All that there is to read, from left to right: source and tokens. For drafters that have no encoder."""
        return self.tokens if self.source is None else [*self.source_tokens, *self.tokens]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens for R rows.

    tokens: int64 [R, K] on the target's device, row i's in the first lengths[i] columns. probs: [R, K, V], the laws they
    were drawn from, or None if all are certain: a point mass each. signals: per row, one per token, if the drafter is
    gated.
    """

    tokens: Tensor
    lengths: list[int]
    probs: Tensor | None = None
    signals: list[list[int]] | None = None


def empty_proposal(rows: int, device: torch.device) -> Proposal:
    """No tokens for anybody."""
    return Proposal(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows)
