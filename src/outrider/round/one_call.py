"""The rule by one call of our kernels, from the logits of a pass to tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from outrider.kernels.calls import SamplingCalls
from outrider.kernels.sampling import reading
from outrider.proposal import DraftRow, Proposal, races_of
from outrider.round.contract import Outcome, Scorer


def one_call(
    scorer: Scorer, rows: Many[DraftRow], proposal: Proposal, scored: Tensor, first: list[int]
) -> list[Outcome] | None:
    """What is kept of each row's draft; None where more is wanted, or the kernels can't read what there is.

    scored: [R, N, V], of which row i's own begin at first[i].
    """
    calls = _calls(scorer, scored, proposal)
    if calls is None:
        return None
    uniforms: list[list[float]] = []
    races = races_of(rows)
    if races is None:
        uniforms = [row.stream.take(length + 1) for row, length in zip(rows, proposal.lengths, strict=True)]
    vocabulary = scorer.vocab_size or scorer.model.vocab_size
    drafts = proposal.on_host()
    found = calls.decide(scored, first, vocabulary, scorer.sampling.law, drafts, uniforms, proposal.probs, races)
    return [
        Outcome([*draft[:accepted], token], accepted, None, None, draft if scorer.extras.drafts else None, None)
        for draft, (accepted, token) in zip(drafts, found, strict=True)
    ]


def _calls(scorer: Scorer, scored: Tensor, proposal: Proposal) -> SamplingCalls | None:
    """Our kernels, if one call of them is all that is wanted of this round, and they can read what there is.

    Laws are not written out then but up to the first rejection, one at a time.
    """
    laws = proposal.probs
    if not scorer.tokens_alone or scored.shape[-1] < (scorer.vocab_size or scorer.model.vocab_size):
        return None
    kernels = reading(scored, laws)
    return kernels.calls if kernels is not None and (laws is None or laws.dtype is torch.float32) else None
