"""Alternatives: the token after a recovered one that had been scored beside the draft.

Beside the draft, tokens that might stand in the places of drafted ones can be scored in the same pass.
They are tested by nothing: the rule decides about the draft as ever, and draws the recovered token as ever. If that happens
to be one of the alternatives for its place, the target's law after it is known already, and the bonus token is drawn from
it. So the law of what is kept is `verify`'s and then the target's own, whatever was chosen to be scored.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import torch
from torch import Tensor

from outrider.models.base import fit_vocabulary, has_same_bits, scores_alternatives
from outrider.proposal import DraftRow, Proposal
from outrider.round.contract import Outcome, Scorer
from outrider.round.several import read_back
from outrider.round.told import told_of
from outrider.sampling import draw, greedy_leads, greedy_tokens, standardize
from outrider.support.device_data import index, to_device

CLEAR = 8 * 2**-8  # of the largest logit; that of rounding was .005 at most in 244 alternatives: see `go_on`


def go_on(
    scorer: Scorer, rows: Many[DraftRow], outcomes: list[Outcome], proposal: Proposal, scored: Tensor, lengths: list[int]
) -> list[Outcome]:
    """The outcomes, with the token after a recovered one that was among the alternatives for its place.

    scored: the logits of the pass, of each row its appended tokens and then its alternatives, [R, N, V].

    An alternative's keys lie in another column than they would, so sums are added up in another order. Where an engine
    promises the same bits in any pass, greedy tokens are to be plain decoding's: so the token that follows is only taken if
    it is the best by far, and what is held of the alternative serves the next draft and is then scored anew.
    """
    found = _recovered(outcomes, proposal)
    if not found:
        return outcomes
    model, sampling = scorer.model, scorer.sampling
    assert scores_alternatives(model)
    at = index([i for i, _ in found], model.device), index([lengths[i] + m for i, m in found], model.device)
    logits = fit_vocabulary(scored[at], scorer.vocab_size or model.vocab_size)
    contexts = None
    if sampling.needs_context:
        contexts = [
            rows[i].context(index([*rows[i].tokens, *outcomes[i].tokens], model.device), len(outcomes[i].tokens))
            for i, _ in found
        ]
    laws: Tensor | None = None
    taken: Many[int] = range(len(found))
    careful = sampling.greedy and has_same_bits(model)
    if careful:
        leads = greedy_leads(logits, sampling, contexts)
        taken = [n for n, (_, lead) in enumerate(leads) if lead >= CLEAR]  # not if it is NaN
        if not taken:
            return outcomes
        bonus = index([token for token, _ in leads], model.device)
        for n in taken:
            rows[found[n][0]].provisional = 1
    for n in taken:
        i, m = found[n]
        model.take_alternative(rows[i].sequence, len(rows[i].tokens) + outcomes[i].accepted, m)
    uniforms = [rows[found[n][0]].stream.take(1)[0] for n in taken]
    if not sampling.greedy:
        laws = standardize(logits, sampling, contexts)
        bonus = draw(laws, to_device(uniforms, model.device, torch.float64))
    elif not careful:
        bonus = greedy_tokens(logits, sampling, contexts)
    columns = [bonus.unsqueeze(-1)]
    if scorer.extras.logprobs:
        columns.append(told_of(logits, bonus, scorer.extras))
    read = read_back(columns)
    outcomes = list(outcomes)
    for n in taken:
        i, _ = found[n]
        outcomes[i] = _with_bonus(outcomes[i], read[n], None if laws is None else laws[n : n + 1])
    return outcomes


def _recovered(outcomes: list[Outcome], proposal: Proposal) -> list[tuple[int, int]]:
    """The rows whose recovered token is one of the alternatives for its place, and which one. Reads these once."""
    offered = proposal.beside
    assert offered is not None
    rejected = [i for i, one in enumerate(outcomes) if one.accepted < proposal.lengths[i] and offered.places[i]]
    tokens = offered.tokens.tolist() if rejected else []
    found = []
    for i in rejected:
        recovered = (outcomes[i].accepted, outcomes[i].tokens[-1])
        each = enumerate(zip(offered.places[i], tokens[i], strict=False))
        found += [(i, m) for m, other in each if other == recovered][:1]
    return found


def _with_bonus(outcome: Outcome, read: list[float], law: Tensor | None) -> Outcome:
    """One token more. read: the token, and what is told of it if that was asked for. law: [1, V]"""
    told = None if outcome.told is None else [*outcome.told, *read[1:]]
    laws = outcome.laws if law is None or outcome.laws is None else torch.cat([outcome.laws, law])
    return replace(outcome, tokens=[*outcome.tokens, int(read[0])], told=told, laws=laws, taken=True)
