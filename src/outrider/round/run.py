"""The pass of a round, then the rule, then alternatives."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.models.base import scores_alternatives
from outrider.proposal import DraftRow, Proposal, one_below_the_other
from outrider.round.alternatives import go_on
from outrider.round.contract import Outcome, Scorer
from outrider.round.one_call import one_call
from outrider.round.several import decided
from outrider.support.device_data import index, to_device


class Group(NamedTuple):
    """Rows that are sampled alike, what is proposed for them, and how that is scored."""

    scorer: Scorer
    rows: Many[DraftRow]
    proposal: Proposal


def verify_round(scorer: Scorer, rows: Many[DraftRow], proposal: Proposal) -> list[Outcome]:
    """Score what the model has not seen of each row, its draft and alternatives, in one pass, and decide what is kept.

    The sequences then hold the draft, too: the caller truncates them.
    """
    scored, lengths, first = _pass(scorer, rows, proposal)
    scored = _kept_from([scorer], scored)
    return _decide(scorer, rows, proposal, scored, lengths, first)


def verify_together(groups: Many[Group]) -> list[list[Outcome] | Exception]:
    """The same for rows of one model that are sampled otherwise, in one pass, which knows nothing of sampling. → of each
    group the outcomes, or what its own settings raised (a processor that a user wrote, say); what the pass raises, raises.
    """
    rows = [row for one in groups for row in one.rows]
    whole = groups[0].proposal if len(groups) == 1 else one_below_the_other([one.proposal for one in groups])
    scored, lengths, first = _pass(groups[0].scorer, rows, whole)
    scored = _kept_from([one.scorer for one in groups], scored)
    outcomes: list[list[Outcome] | Exception] = []
    end = 0
    for one in groups:
        begin, end = end, end + len(one.rows)
        try:
            own = scored if len(groups) == 1 else scored[begin:end]
            outcomes.append(_decide(one.scorer, one.rows, one.proposal, own, lengths[begin:end], first[begin:end]))
        except Exception as error:
            outcomes.append(error)
    return outcomes


def _kept_from(scorers: Many[Scorer], scored: Tensor) -> Tensor:
    """The logits of a pass, where no other pass of the model overwrites them: a user's function may make one."""
    return scored.clone() if any(one.sampling.calls_back for one in scorers) else scored


def _decide(
    scorer: Scorer, rows: Many[DraftRow], proposal: Proposal, scored: Tensor, lengths: list[int], first: list[int]
) -> list[Outcome]:
    """What is kept. scored: the logits of the pass, [R, N, V]; lengths, first: as `_pass` returns them."""
    with scorer.clock.phase("sampling"):
        outcomes = one_call(scorer, rows, proposal, scored, first)
        if outcomes is None:
            outcomes = decided(scorer, rows, proposal, scored, first)
        return outcomes if proposal.beside is None else go_on(scorer, rows, outcomes, proposal, scored, lengths)


def _pass(scorer: Scorer, rows: Many[DraftRow], proposal: Proposal) -> tuple[Tensor, list[int], list[int]]:
    """→ the logits of what was appended [R, N, V], how many tokens that were, the place of each row's newest certain one"""
    model, clock = scorer.model, scorer.clock
    for row in rows:
        if row.provisional:
            row.sequence.truncate(max(0, row.sequence.length - row.provisional))
            row.provisional = 0
    with clock.phase("sampling"):
        tokens, lengths, first = _to_score(rows, proposal, model.device)
        if scorer.vocab_size is not None and scorer.vocab_size > model.vocab_size:
            tokens = tokens.where(tokens < model.vocab_size, 0)  # padding entries that only a larger target has
    with clock.phase(scorer.phase):
        sequences = [row.sequence for row in rows]
        if proposal.beside is None:
            scored = model.score(sequences, tokens, lengths, "all")
            assert scored is not None
        else:
            assert scores_alternatives(model)  # nobody drafts any for other models
            places = [[at + 1 + place for place in own] for at, own in zip(first, proposal.beside.places, strict=True)]
            scored = model.score_beside(sequences, tokens, lengths, proposal.beside.tokens, places)
    return scored, lengths, first


def _to_score(rows: Many[DraftRow], proposal: Proposal, device: torch.device) -> tuple[Tensor, list[int], list[int]]:
    """Unseen tokens and drafts side by side. → int64 [R, N], how many, the column of each row's newest certain token"""
    pending = [row.tokens[row.sequence.length :] for row in rows]
    lengths = [len(unseen) + drafted for unseen, drafted in zip(pending, proposal.lengths, strict=True)]
    first = [len(unseen) - 1 for unseen in pending]
    if not any(first):
        if proposal.known is not None and device.type == "cpu":
            width = max(proposal.lengths)
            whole = [[*p, *draft, *[0] * (width - len(draft))] for p, draft in zip(pending, proposal.known, strict=True)]
            return to_device(whole, device, torch.long), lengths, first
        newest = index([p[0] for p in pending], device).unsqueeze(-1)
        return torch.cat([newest, proposal.tokens], dim=1) if proposal.tokens.shape[1] else newest, lengths, first
    width = proposal.tokens.shape[1]
    tokens = torch.zeros(len(rows), max(first) + 1 + width, dtype=torch.long, device=device)
    for i, unseen in enumerate(pending):
        tokens[i, : len(unseen)] = index(unseen, device)
        tokens[i, len(unseen) : len(unseen) + width] = proposal.tokens[i]
    return tokens[:, : max(lengths)], lengths, first
