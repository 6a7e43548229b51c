"""What a generation is to report beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extras:
    """What a round reports beyond the tokens. logprobs and betas cost a pass over the vocabulary each, drafts nothing: the
    offered tokens are in the round's one transfer anyway. laws: what the tokens follow, which need not be written out else.
    top_logprobs: how many of the most probable tokens are told with logprobs.
    """

    logprobs: bool = False
    betas: bool = False
    drafts: bool = False
    laws: bool = False
    top_logprobs: int = 0

    @property
    def told(self) -> int:
        """The numbers that a round reads back of each position for log-probabilities (`round.told`)."""
        return 1 + 2 * self.top_logprobs if self.logprobs else 0
