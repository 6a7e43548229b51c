"""One round on the device: score the draft, standardise, verify, and read everything back in a single transfer.

The decoder's rounds and those inside a drafter that is itself a speculative decoder are the same computation.

At temperature 0 the target's laws are point masses, and the acceptance rule says: keep what agrees with its best tokens. No
law is written out then: beside a quick engine's passes that alone would be several per cent of a round.

**Alternatives.** Beside the draft, tokens that might stand in the places of drafted ones can be scored in the same pass.
They are tested by nothing: the rule decides about the draft as ever, and draws the recovered token as ever. If that happens
to be one of the alternatives for its place, the target's law after it is known already, and the bonus token is drawn from
it. So the law of what is kept is `verify`'s and then the target's own, whatever was chosen to be scored.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from outrider.clock import PhaseClock
from outrider.device_data import index, to_device
from outrider.kernels.calls import SamplingCalls
from outrider.kernels.sampling import reading
from outrider.lenience import lenient_betas, soft, verify_lenient, verify_near_best
from outrider.models.base import LanguageModel, fit_vocabulary, has_same_bits, scores_alternatives
from outrider.proposal import DraftRow, Proposal
from outrider.sampling import Context, SamplingSettings, draw, greedy_leads, greedy_on_host, greedy_tokens, standardize
from outrider.sampling.penalties import State
from outrider.theory import acceptance_probability
from outrider.verify import Uniforms, Verdict, verify

CLEAR = 8 * 2**-8  # of the largest logit; that of rounding was .005 at most in 244 alternatives: see `_go_on`
RAGGED = 0.75  # up to this share of positions in use, top-p is applied to them alone (measured in EXPERIMENTS.md)


@dataclass(frozen=True)
class Extras:
    """What a round reports beyond the tokens. logprobs and betas cost a pass over the vocabulary each, drafts nothing: the
    offered tokens are in the round's one transfer anyway. laws: what the tokens follow, which need not be written out else.
    """

    logprobs: bool = False
    betas: bool = False
    drafts: bool = False
    laws: bool = False


@dataclass(frozen=True)
class Outcome:
    """One row's result on the host: the accepted tokens and the one after them, and the extras asked for.

    The token after them is -1 if there is no law for it, which matters only if the sequence goes on that far.
    laws: [accepted + 1, V], the distributions that these tokens follow; stays on the device; None if they are point masses,
    or were neither asked for nor made.
    lenient: accepted tokens, by position, that the exact rule would have rejected.
    taken: the recovered token was an alternative, so one token more follows it; the sequence ends with the recovered one.
    """

    tokens: list[int]
    accepted: int
    logprobs: list[float] | None
    betas: list[float] | None
    drafts: list[int] | None
    laws: Tensor | None
    lenient: tuple[int, ...] = ()
    taken: bool = False


@dataclass(frozen=True)
class Scorer:
    """How a round is scored. vocab_size: the width of the laws, if not the model's. phase: what the pass is timed as.

    lenience: below 1 the round is lossy (`lenience`); a drafter's own rounds never are.
    """

    model: LanguageModel
    sampling: SamplingSettings
    clock: PhaseClock
    extras: Extras = Extras()
    vocab_size: int | None = None
    phase: str = "verify"
    lenience: float = 1.0


def verify_round(scorer: Scorer, rows: Many[DraftRow], proposal: Proposal) -> list[Outcome]:
    """Score what the model has not seen of each row, its draft and alternatives, in one pass, and decide what is kept.

    The sequences then hold the draft, too: the caller truncates them.
    """
    outcomes, scored, lengths = _verify(scorer, rows, proposal)
    if proposal.beside is None:
        return outcomes
    with scorer.clock.phase("sampling"):
        return _go_on(scorer, rows, outcomes, proposal, scored, lengths)


def _verify(scorer: Scorer, rows: Many[DraftRow], proposal: Proposal) -> tuple[list[Outcome], Tensor, list[int]]:
    """What the rule keeps of the draft. → the outcomes, the logits of the pass [R, N, V], each row's appended tokens"""
    scored, lengths, first = _pass(scorer, rows, proposal)
    with scorer.clock.phase("sampling"):
        calls = _in_one_call(scorer, scored, proposal)
        if calls is not None:
            outcomes = _called(calls, scorer, rows, proposal, scored, first)
        else:
            outcomes = _decided(scorer, rows, proposal, scored, first)
    return outcomes, scored, lengths


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


def _decided(scorer: Scorer, rows: Many[DraftRow], proposal: Proposal, scored: Tensor, first: list[int]) -> list[Outcome]:
    """The rule by several operations. scored: [R, N, V], of which row i's own begin at first[i]."""
    model = scorer.model
    width = proposal.tokens.shape[1]
    logits = fit_vocabulary(_from(scored, first, width + 1), scorer.vocab_size or model.vocab_size)
    contexts = _contexts(rows, proposal, model.device) if scorer.sampling.needs_context else None
    if scorer.sampling.greedy and scorer.lenience == 1.0 and not scorer.extras.betas:
        for row, length in zip(rows, proposal.lengths, strict=True):
            row.stream.take(length + 1)  # no use for them, but later drafts must not depend on what is reported
        return _greedy_outcomes(scorer, logits, contexts, proposal)
    uniforms = _uniforms(rows, proposal, model.device)
    probs = _laws(logits, scorer.sampling, contexts, proposal.lengths)
    drafted = index(proposal.lengths, model.device)
    lossy = _Lossy(scorer, logits, contexts) if scorer.lenience < 1.0 else None
    if lossy is None:
        verdict = verify(probs, proposal.probs, proposal.tokens, uniforms, drafted)
    else:
        verdict = lossy.verify(probs, proposal, uniforms, drafted)
    columns = [verdict.num_accepted.unsqueeze(-1), verdict.next_token.unsqueeze(-1), proposal.tokens]
    if scorer.extras.logprobs:
        columns.append(_chosen_logprobs(logits, proposal.tokens, verdict.num_accepted, verdict.next_token))
    if scorer.extras.betas:
        columns.append(_betas(probs, proposal) if lossy is None else lossy.betas(probs, proposal))
    if verdict.lenient is not None:
        columns.append(verdict.lenient)
    packed = _read(columns)
    return [_unpack(scorer, packed[i], proposal, i, probs[i]) for i in range(len(rows))]


def _in_one_call(scorer: Scorer, scored: Tensor, proposal: Proposal) -> SamplingCalls | None:
    """Our kernels, if one call of them is all that is wanted of a round: tokens, by the exact rule, of logits as they are.

    Laws are not written out then but up to the first rejection, one at a time.
    """
    extras, laws = scorer.extras, proposal.probs
    if scorer.lenience < 1.0 or extras.logprobs or extras.betas or (extras.laws and not scorer.sampling.greedy):
        return None
    if not scorer.sampling.as_they_are or scored.shape[-1] < (scorer.vocab_size or scorer.model.vocab_size):
        return None
    kernels = reading(scored, laws)
    return kernels.calls if kernels is not None and (laws is None or laws.dtype is torch.float32) else None


def _called(
    calls: SamplingCalls, scorer: Scorer, rows: Many[DraftRow], proposal: Proposal, scored: Tensor, first: list[int]
) -> list[Outcome]:
    """The rule by one call. scored: [R, N, V], of which row i's own begin at first[i]."""
    uniforms = [row.stream.take(length + 1) for row, length in zip(rows, proposal.lengths, strict=True)]
    vocabulary = scorer.vocab_size or scorer.model.vocab_size
    drafts = proposal.on_host()
    found = calls.decide(scored, first, vocabulary, scorer.sampling.law, drafts, uniforms, proposal.probs)
    return [
        Outcome([*draft[:accepted], token], accepted, None, None, draft if scorer.extras.drafts else None, None)
        for draft, (accepted, token) in zip(drafts, found, strict=True)
    ]


def _go_on(
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
        before = [[*rows[i].tokens, *outcomes[i].tokens] for i, _ in found]
        contexts = [Context(index(b, model.device), rows[i].prompt_length) for (i, _), b in zip(found, before, strict=True)]
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
        columns.append(_logprobs_at(logits, bonus).unsqueeze(-1))
    read = _read(columns)
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
    """One token more. read: the token, and its log-probability if that was asked for. law: [1, V]"""
    logprobs = outcome.logprobs if outcome.logprobs is None else [*outcome.logprobs, *read[1:]]
    laws = outcome.laws if law is None or outcome.laws is None else torch.cat([outcome.laws, law])
    return replace(outcome, tokens=[*outcome.tokens, int(read[0])], logprobs=logprobs, laws=laws, taken=True)


def _greedy_outcomes(scorer: Scorer, logits: Tensor, contexts: list[Context] | None, proposal: Proposal) -> list[Outcome]:
    """Accept the draft as far as it says what the target would. logits: [R, K+1, V]"""
    width = proposal.tokens.shape[1]
    if logits.device.type == "cpu" and not scorer.extras.logprobs:
        best = greedy_on_host(logits, scorer.sampling, contexts)
        offers = proposal.tokens.tolist() if width else [[]] * len(logits)
        packed = [best[i * (width + 1) : (i + 1) * (width + 1)] + offered for i, offered in enumerate(offers)]
    else:
        packed = _read_greedy(scorer, logits, contexts, proposal)
    outcomes = []
    for values, drafted in zip(packed, proposal.lengths, strict=True):
        chosen, offered = [int(t) for t in values[: width + 1]], [int(t) for t in values[width + 1 :][:drafted]]
        accepted = next((i for i, token in enumerate(offered) if token != chosen[i]), drafted)
        logprobs = values[2 * width + 1 :][: accepted + 1] if scorer.extras.logprobs else None
        drafts = offered if scorer.extras.drafts else None
        outcomes.append(Outcome(chosen[: accepted + 1], accepted, logprobs, None, drafts, None))
    return outcomes


def _read_greedy(scorer: Scorer, logits: Tensor, contexts: list[Context] | None, proposal: Proposal) -> list[list[float]]:
    """Of each row the best tokens, its draft, and log-probabilities if they are asked for."""
    best = greedy_tokens(logits, scorer.sampling, contexts)
    columns = [best, proposal.tokens]
    if scorer.extras.logprobs:
        columns.append(_logprobs_at(logits, best))
    return _read(columns)


def _read(columns: list[Tensor]) -> list[list[float]]:
    """Columns [R, n] side by side, a list for each row: elsewhere than on a CPU the round's one synchronisation."""
    if columns[0].device.type == "cpu":
        return [list(chain.from_iterable(parts)) for parts in zip(*(column.tolist() for column in columns), strict=True)]
    return torch.cat([column.double() for column in columns], dim=1).tolist()  # ids are exact


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
            contexts.append(Context(full[: known + j], row.prompt_length, state))
    return contexts


def _chosen_logprobs(logits: Tensor, drafts: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """Log softmax of the raw logits (temperature 1, no processors) at the tokens kept. → [R, K+1], then padding"""
    positions = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    return _logprobs_at(logits, torch.where(positions == num_accepted.unsqueeze(-1), next_token.unsqueeze(-1), padded))


def _logprobs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """[R, K+1, V], int64 [R, K+1] → [R, K+1]; anything where there is no token (-1)"""
    chosen = tokens.clamp(min=0)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)


def _betas(probs: Tensor, proposal: Proposal) -> Tensor:
    if proposal.probs is None:
        return probs[:, :-1].gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
    return acceptance_probability(probs[:, :-1], proposal.probs)


class _Lossy:
    """The lenient rule of a round: greedy, by the law before it is made one-hot; else by the ratio."""

    def __init__(self, scorer: Scorer, logits: Tensor, contexts: list[Context] | None) -> None:
        self.lenience = scorer.lenience
        self.soft = standardize(logits, soft(scorer.sampling), contexts) if scorer.sampling.greedy else None

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
    logprobs = None
    if scorer.extras.logprobs:
        logprobs, rest = rest[: accepted + 1], rest[width + 1 :]
    betas = None
    if scorer.extras.betas:
        betas, rest = rest[: proposal.lengths[i]], rest[width:]
    lenient = tuple(place for place, flag in enumerate(rest[:accepted]) if flag) if scorer.lenience < 1.0 else ()
    tokens = [int(t) for t in values[2 : 2 + accepted]] + [following]
    drafts = [int(t) for t in values[2 : 2 + proposal.lengths[i]]] if scorer.extras.drafts else None
    return Outcome(tokens, accepted, logprobs, betas, drafts, laws[: accepted + 1], lenient)
