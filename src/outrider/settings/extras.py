"""What a generation is to report beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extras:
    """What a round reports beyond the tokens. logprobs and betas cost a pass over the vocabulary each, drafts nothing: the
    offered tokens are in the round's one transfer anyway. laws: what the tokens follow, which need not be written out else.
    """

    logprobs: bool = False
    betas: bool = False
    drafts: bool = False
    laws: bool = False
