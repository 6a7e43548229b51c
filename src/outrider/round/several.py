"""The rule by several operations, of torch on any device or our kernels'; and what a round reports beyond tokens.

At temperature 0 the target's laws are point masses, and the acceptance rule says: keep what agrees with its best tokens. No
law is written out then: beside a quick engine's passes that alone would be several per cent of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import chain

import torch
from torch import Tensor

from outrider.acceptance.by_position import verify_by_position
from outrider.acceptance.lenience import lenient_betas, verify_lenient, verify_near_best
from outrider.acceptance.verify import Uniforms, Verdict, verify
from outrider.models.base import fit_vocabulary
from outrider.proposal import DraftRow, Proposal, races_of
from outrider.round.contract import Outcome, Scorer
from outrider.round.told import told_of
from outrider.sampling import Context, SamplingSettings, greedy_on_host, greedy_tokens, standardize
from outrider.sampling.penalties import State
from outrider.support.device_data import index, to_device
from outrider.theory import acceptance_probability, race_acceptance_probability

RAGGED = 0.75  # up to this share of positions in use, top-p is applied to them alone (measured in EXPERIMENTS.md)


def decided(scorer: Scorer, rows: Many[DraftRow], proposal: Proposal, scored: Tensor, first: list[int]) -> list[Outcome]:
    """The rule by several operations. scored: [R, N, V], of which row i's own begin at first[i]."""
    model = scorer.model
    width = proposal.tokens.shape[1]
    logits = fit_vocabulary(_from(scored, first, width + 1), scorer.vocab_size or model.vocab_size)
    contexts = _contexts(rows, proposal, model.device) if scorer.sampling.needs_context else None
    if scorer.sampling.greedy and scorer.lenience == 1.0 and not scorer.extras.betas:
        for row, length in zip(rows, proposal.lengths, strict=True):
            row.stream.take(length + 1)  # no use for them, but later drafts must not depend on what is reported
        return _greedy_outcomes(scorer, logits, contexts, proposal)
    probs = _laws(logits, scorer.sampling, contexts, proposal.lengths)
    drafted = index(proposal.lengths, model.device)
    lossy = _Lossy(scorer, logits, contexts) if scorer.lenience < 1.0 else None
    races = races_of(rows)
    if races is not None:
        verdict = verify_by_position(probs, proposal.tokens, *races, drafted)
    elif lossy is None:
        verdict = verify(probs, proposal.probs, proposal.tokens, _uniforms(rows, proposal, model.device), drafted)
    else:
        verdict = lossy.verify(probs, proposal, _uniforms(rows, proposal, model.device), drafted)
    columns = [verdict.num_accepted.unsqueeze(-1), verdict.next_token.unsqueeze(-1), proposal.tokens]
    if scorer.extras.logprobs:
        kept = _kept(proposal.tokens, verdict.num_accepted, verdict.next_token)
        columns.append(told_of(logits, kept, scorer.extras).flatten(1))
    if scorer.extras.betas:
        rule = acceptance_probability if races is None else race_acceptance_probability
        columns.append(_betas(probs, proposal, rule) if lossy is None else lossy.betas(probs, proposal))
    if verdict.lenient is not None:
        columns.append(verdict.lenient)
    packed = read_back(columns)
    return [_unpack(scorer, packed[i], proposal, i, probs[i]) for i in range(len(rows))]


def _greedy_outcomes(scorer: Scorer, logits: Tensor, contexts: list[Context] | None, proposal: Proposal) -> list[Outcome]:
    """Accept the draft as far as it says what the target would. logits: [R, K+1, V]"""
    width = proposal.tokens.shape[1]
    if logits.device.type == "cpu" and not scorer.extras.logprobs:
        best = _best_on_host(scorer, logits, contexts, proposal)
        offers = proposal.tokens.tolist() if width else [[]] * len(logits)
        packed = [best[i * (width + 1) : (i + 1) * (width + 1)] + offered for i, offered in enumerate(offers)]
    else:
        packed = _read_greedy(scorer, logits, contexts, proposal)
    outcomes = []
    for values, drafted in zip(packed, proposal.lengths, strict=True):
        chosen, offered = [int(t) for t in values[: width + 1]], [int(t) for t in values[width + 1 :][:drafted]]
        accepted = next((i for i, token in enumerate(offered) if token != chosen[i]), drafted)
        told = values[2 * width + 1 :][: (accepted + 1) * scorer.extras.told] if scorer.extras.logprobs else None
        drafts = offered if scorer.extras.drafts else None
        outcomes.append(Outcome(chosen[: accepted + 1], accepted, told, None, drafts, None))
    return outcomes


def _best_on_host(scorer: Scorer, logits: Tensor, contexts: list[Context] | None, proposal: Proposal) -> list[int]:
    """Of each position [R, K+1, V], row by row, the best token; of those behind a row's own draft anything."""
    width = logits.shape[1]
    if not scorer.sampling.as_they_are or min(proposal.lengths) + 1 == width:
        return greedy_on_host(logits, scorer.sampling, contexts)
    best: list[int] = []
    for row, count in zip(logits, proposal.lengths, strict=True):
        best += [*greedy_on_host(row[: count + 1], scorer.sampling), *[0] * (width - 1 - count)]
    return best


def _read_greedy(scorer: Scorer, logits: Tensor, contexts: list[Context] | None, proposal: Proposal) -> list[list[float]]:
    """Of each row the best tokens, its draft, and log-probabilities if they are asked for."""
    best = greedy_tokens(logits, scorer.sampling, contexts)
    columns = [best, proposal.tokens]
    if scorer.extras.logprobs:
        columns.append(told_of(logits, best, scorer.extras).flatten(1))
    return read_back(columns)


def read_back(columns: list[Tensor]) -> list[list[float]]:
    """Columns [R, n] side by side, a list for each row: elsewhere than on a CPU the round's one synchronisation."""
    if columns[0].device.type == "cpu":
        return [list(chain.from_iterable(parts)) for parts in zip(*(column.tolist() for column in columns), strict=True)]
    return torch.cat([column.double() for column in columns], dim=1).tolist()  # ids are exact


def _from(scored: Tensor, first: list[int], count: int) -> Tensor:
    """Each row's `count` positions from its first one on; what lies beyond its own is never looked at. → [R, count, V]"""
    if not any(first) and scored.shape[1] >= count:
        return scored[:, :count]
    columns = index(first, scored.device).unsqueeze(-1) + torch.arange(count, device=scored.device)
    rows = torch.arange(len(first), device=scored.device).unsqueeze(-1)
    return scored[rows, columns.clamp(max=scored.shape[1] - 1)]


def _laws(logits: Tensor, sampling: SamplingSettings, contexts: list[Context] | None, drafted: list[int]) -> Tensor:
    """The target's laws, zeros behind a row's own draft where leaving those out saves work. [R, K+1, V] → [R, K+1, V]

    Copying the rest to and fro costs more than a softmax or a top-k of all, and less than a top-p.
    """
    rows, width, vocabulary = logits.shape
    wanted = sum(drafted) + rows
    if sampling.greedy or sampling.top_p == 1.0 or logits.device.type != "cpu" or wanted > RAGGED * rows * width:
        return standardize(logits, sampling, contexts)
    places = [i * width + j for i, count in enumerate(drafted) for j in range(count + 1)]
    at = index(places, logits.device)
    own = None if contexts is None else [contexts[place] for place in places]
    laws = standardize(logits.reshape(-1, vocabulary)[at], sampling, own)
    return laws.new_zeros(rows * width, vocabulary).index_copy_(0, at, laws).view(rows, width, vocabulary)


def _uniforms(rows: Many[DraftRow], proposal: Proposal, device: torch.device) -> Uniforms:
    """Fresh numbers of each row's own stream: one per drafted token and one for the token after them."""
    width = proposal.tokens.shape[1]
    values = []
    for row, length in zip(rows, proposal.lengths, strict=True):
        taken = row.stream.take(length + 1)
        values.append(taken[:-1] + [0.0] * (width - length) + taken[-1:])
    tensor = to_device(values, device, torch.float64)
    return Uniforms(accept=tensor[:, :-1], next_token=tensor[:, -1])


def _contexts(rows: Many[DraftRow], proposal: Proposal, device: torch.device) -> list[Context]:
    """The tokens before each scored position, drafted ones included, row by row."""
    contexts = []
    for i, row in enumerate(rows):
        full = torch.cat([index(row.tokens, device), proposal.tokens[i]])
        known = len(row.tokens)
        for j in range(proposal.tokens.shape[1] + 1):
            state: State = "unused" if j > proposal.lengths[i] else "drafted" if j else "certain"
            contexts.append(row.context(full[: known + j], j, state))
    return contexts


def _kept(drafts: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """The tokens kept, then padding. → [R, K+1]"""
    positions = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    return torch.where(positions == num_accepted.unsqueeze(-1), next_token.unsqueeze(-1), padded)


def _betas(probs: Tensor, proposal: Proposal, rule: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The probability that a rule keeps what is offered at each position. rule: of the two laws. → [R, K]"""
    if proposal.probs is None:
        return probs[:, :-1].gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
    return rule(probs[:, :-1], proposal.probs)


class _Lossy:
    """The lenient rule of a round: greedy, by the law before it is made one-hot; else by the ratio."""

    def __init__(self, scorer: Scorer, logits: Tensor, contexts: list[Context] | None) -> None:
        self.lenience = scorer.lenience
        self.soft = standardize(logits, scorer.sampling.processed_only(), contexts) if scorer.sampling.greedy else None

    def verify(self, probs: Tensor, proposal: Proposal, uniforms: Uniforms, drafted: Tensor) -> Verdict:
        if self.soft is not None:
            return verify_near_best(probs, self.soft, proposal.tokens, uniforms, drafted, self.lenience)
        return verify_lenient(probs, proposal.probs, proposal.tokens, uniforms, drafted, self.lenience)

    def betas(self, probs: Tensor, proposal: Proposal) -> Tensor:
        """The probability that this rule accepts what is offered at each position. → [R, K]"""
        draft = proposal.probs
        if draft is None:
            draft = torch.zeros_like(probs[:, :-1]).scatter_(-1, proposal.tokens.unsqueeze(-1), 1.0)
        known = None if self.soft is None else self.soft[:, :-1]
        return lenient_betas(probs[:, :-1], draft, self.lenience, known)


def _unpack(scorer: Scorer, values: list[float], proposal: Proposal, i: int, laws: Tensor) -> Outcome:
    width = proposal.tokens.shape[1]
    accepted, following = int(values[0]), int(values[1])
    rest = values[2 + width :]
    told = None
    if scorer.extras.logprobs:
        each = scorer.extras.told
        told, rest = rest[: (accepted + 1) * each], rest[(width + 1) * each :]
    betas = None
    if scorer.extras.betas:
        betas, rest = rest[: proposal.lengths[i]], rest[width:]
    lenient = tuple(place for place, flag in enumerate(rest[:accepted]) if flag) if scorer.lenience < 1.0 else ()
    tokens = [int(t) for t in values[2 : 2 + accepted]] + [following]
    drafts = [int(t) for t in values[2 : 2 + proposal.lengths[i]]] if scorer.extras.drafts else None
    return Outcome(tokens, accepted, told, betas, drafts, laws[: accepted + 1], lenient)
