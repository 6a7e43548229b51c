"""One round on the device: score the draft, standardise, verify, and read everything back in a single transfer."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.clock import PhaseClock
from outrider.decode.row import Row
from outrider.device_data import index, to_device
from outrider.drafters.base import Proposal
from outrider.errors import NumericalError
from outrider.models.base import LanguageModel
from outrider.sampling import Context, SamplingSettings, standardize
from outrider.theory import acceptance_probability
from outrider.verify import Uniforms, verify


@dataclass(frozen=True)
class Extras:
    """What a round reports beyond the tokens; each costs a pass over the vocabulary."""

    logprobs: bool = False
    betas: bool = False


@dataclass(frozen=True)
class Outcome:
    """One row's result on the host: the accepted tokens and the one after them, and the extras asked for."""

    tokens: list[int]
    accepted: int
    logprobs: list[float] | None
    betas: list[float] | None


def verify_round(
    target: LanguageModel,
    rows: Many[Row],
    proposal: Proposal,
    sampling: SamplingSettings,
    extras: Extras,
    clock: PhaseClock,
) -> list[Outcome]:
    """Score each row's last token and its draft in one pass of the target and decide what is kept."""
    with clock.phase("sampling"):
        last = index([row.tokens[-1] for row in rows], target.device).unsqueeze(-1)
        tokens = torch.cat([last, proposal.tokens], dim=1)
        uniforms = _uniforms(rows, proposal, target.device)
    with clock.phase("verify"):
        sequences = [row.sequence for row in rows]
        logits = target.score(sequences, tokens, [n + 1 for n in proposal.lengths], "all")
        assert logits is not None
    with clock.phase("sampling"):
        contexts = _contexts(rows, proposal, target.device) if sampling.needs_context else None
        probs = standardize(logits, sampling, contexts)
        drafted = index(proposal.lengths, target.device)
        verdict = verify(probs, proposal.probs, proposal.tokens, uniforms, drafted)
        columns = [verdict.num_accepted.unsqueeze(-1), verdict.next_token.unsqueeze(-1), proposal.tokens]
        if extras.logprobs:
            columns.append(_chosen_logprobs(logits, proposal.tokens, verdict.num_accepted, verdict.next_token))
        if extras.betas:
            columns.append(_betas(probs, proposal))
        # The round's one synchronisation. Token ids are exact in float64.
        packed = torch.cat([column.double() for column in columns], dim=1).tolist()
    return [_unpack(row, values, proposal, i, extras) for i, (row, values) in enumerate(zip(rows, packed, strict=True))]


def _uniforms(rows: Many[Row], proposal: Proposal, device: torch.device) -> Uniforms:
    """Fresh numbers of each row's own stream: one per drafted token and one for the token after them."""
    width = proposal.tokens.shape[1]
    values = []
    for row, length in zip(rows, proposal.lengths, strict=True):
        taken = row.request.stream.take(length + 1)
        values.append(taken[:-1] + [0.0] * (width - length) + taken[-1:])
    tensor = to_device(values, device, torch.float64)
    return Uniforms(accept=tensor[:, :-1], next_token=tensor[:, -1])


def _contexts(rows: Many[Row], proposal: Proposal, device: torch.device) -> list[Context]:
    """The tokens before each scored position, drafted ones included, row by row."""
    contexts = []
    for i, row in enumerate(rows):
        full = torch.cat([index(row.tokens, device), proposal.tokens[i]])
        known, prompt = len(row.tokens), row.draft.prompt_length
        contexts += [Context(full[: known + j], prompt) for j in range(proposal.tokens.shape[1] + 1)]
    return contexts


def _chosen_logprobs(logits: Tensor, drafts: Tensor, num_accepted: Tensor, next_token: Tensor) -> Tensor:
    """Log softmax of the raw logits (temperature 1, no processors) at the tokens kept. → [R, K+1], then padding"""
    positions = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    chosen = torch.where(positions == num_accepted.unsqueeze(-1), next_token.unsqueeze(-1), padded).clamp(min=0)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)


def _betas(probs: Tensor, proposal: Proposal) -> Tensor:
    if proposal.probs is None:
        return probs[:, :-1].gather(-1, proposal.tokens.unsqueeze(-1)).squeeze(-1)
    return acceptance_probability(probs[:, :-1], proposal.probs)


def _unpack(row: Row, values: list[float], proposal: Proposal, i: int, extras: Extras) -> Outcome:
    width = proposal.tokens.shape[1]
    accepted, following = int(values[0]), int(values[1])
    if following < 0:
        raise NumericalError(
            f"the target gave no distribution for row {row.number} after token {len(row.tokens) + accepted - 1}: its logits "
            "are NaN or all excluded; try --dtype float32, or loosen logit_bias and processors"
        )
    rest = values[2 + width :]
    logprobs = None
    if extras.logprobs:
        logprobs, rest = rest[: accepted + 1], rest[width + 1 :]
    betas = rest[: proposal.lengths[i]] if extras.betas else None
    return Outcome([int(t) for t in values[2 : 2 + accepted]] + [following], accepted, logprobs, betas)
