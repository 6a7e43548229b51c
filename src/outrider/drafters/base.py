"""The contract between the decoding loop and whatever proposes tokens.

A drafter keeps a state per sequence. It may stop early or propose nothing, but it must never withhold a token that it has
drawn: whether a position is offered must not depend on the token drawn for it, or the law is bent (`verify`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.clock import PhaseClock
from outrider.sampling import SamplingSettings


@dataclass
class DraftRow:
    """One sequence as its drafter sees it.

    tokens: prompt and output so far (shared with the decoder, never changed here). state: the drafter's own.
    """

    tokens: list[int]
    prompt_length: int
    state: Any = None


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens for R rows.

    tokens: int64 [R, K] on the target's device, row i's in the first lengths[i] columns. probs: [R, K, V], the laws they
    were drawn from, or None if the drafter is deterministic (a point mass).
    """

    tokens: Tensor
    lengths: list[int]
    probs: Tensor | None = None


@dataclass
class DraftContext:
    """What drafting depends on besides the rows: the sampling law, the target's vocabulary and device, the clock."""

    sampling: SamplingSettings
    vocab_size: int
    device: torch.device
    clock: PhaseClock = field(default_factory=PhaseClock)


class Drafter(ABC):
    """Proposes tokens. One instance may serve several generations in turn; state lives in the rows."""

    name: str

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        """Prepare the rows (their `state`) once their prompts are known."""
        del rows, context

    def hint(self, row: DraftRow) -> int:
        """A class of proposals that fare alike, told to the draft-length policy before it decides."""
        del row
        return 0

    def prior(self, hint: int) -> tuple[float, float]:
        """Acceptance to assume at first in this class: of the first drafted token, and of each later one."""
        del hint
        return 0.75, 0.75

    @abstractmethod
    def propose(
        self, rows: Many[DraftRow], limits: Many[int], uniforms: Many[Many[float]], context: DraftContext
    ) -> Proposal:
        """Draft up to limits[i] ≥ 0 tokens after row i, using uniforms[i] (as many as its limit) for the draws."""

    def observe(self, rows: Many[DraftRow], drafted: Many[int], accepted: Many[int]) -> None:
        """Told after each round what became of the proposal; `rows` already hold the new tokens."""
        del rows, drafted, accepted

    def end(self, row: DraftRow) -> None:
        """The row is finished: free its state."""
        del row

    def check(self, target: Any) -> None:
        """Raise if this drafter can't draft for `target`."""
        del target


def empty_proposal(rows: int, device: torch.device) -> Proposal:
    """No tokens for anybody."""
    return Proposal(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows)
