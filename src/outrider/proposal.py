"""What a drafter is shown of a sequence, and what it proposes for a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.models.base import Sequence
from outrider.randomness import RandomStream


@dataclass
class DraftRow:
    """One sequence as its drafter sees it.

    tokens: prompt and output so far (shared with the decoder, never changed here). stream: the row's randomness, from
    which every draw takes fresh numbers. sequence: the target's own. state: the drafter's. uncertain: how many of the last
    tokens may be taken back, inside a drafter that is itself a speculative decoder.
    """

    tokens: list[int]
    prompt_length: int
    stream: RandomStream
    sequence: Sequence
    state: Any = None
    uncertain: int = 0

    @property
    def certain(self) -> int:
        """How many of the tokens stay for good."""
        return len(self.tokens) - self.uncertain


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
