"""The acceptance rule: Chen Algorithm 2, Leviathan Algorithm 1. Pure, batched, ragged, on any device.

For each drafted token x, in order, accept with probability min(1, target(x) / draft(x)); at the first rejection draw the
*recovered* token from the normalised positive part of target - draft; if all are accepted, draw the *bonus* token from
the target. The tokens kept then follow the target's law exactly (Chen Theorem 1, Leviathan A.1): x is kept with
probability min(target, draft), and what is missing, (target - draft)+, is what recovery adds.

The proof needs that draft tokens were drawn from the very `draft_probs` given here, that the uniforms are fresh, and that
whether a position is offered does not depend on the token drafted for it. The last is why a drafter may stop early but
must never withhold a token that it has drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.errors import ParameterError
from outrider.kernels.sampling import reading
from outrider.sampling.draw import draw, draw_on_host, on_host
from outrider.support.device_data import row_by_row


@dataclass(frozen=True)
class Uniforms:
    """The randomness of one verification: accept [.., K] and next_token [..], independent uniforms in [0, 1)."""

    accept: Tensor
    next_token: Tensor


@dataclass(frozen=True)
class Verdict:
    """num_accepted: int64 [..]. next_token: int64 [..], recovered or bonus; -1 where the target gave no distribution.

    lenient: bool [.., K], tokens kept by lenience alone (`lenience`); None from rules that are exact.
    """

    num_accepted: Tensor
    next_token: Tensor
    lenient: Tensor | None = None


def verify(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    randomness: Uniforms | torch.Generator,
    num_drafted: Tensor | None = None,
) -> Verdict:
    """Accept a prefix of the draft and draw the token after it.

    target_probs: [.., K+1, V]; row i is the target's law after i drafted tokens.
    draft_probs: [.., K, V], the law each draft token was drawn from, or None if the drafter is deterministic.
    draft_tokens: int64 [.., K].
    randomness: the uniforms, or a generator to draw them from (on the generator's device).
    num_drafted: int64 [..], how many of the K are real in each row of a ragged batch; all by default.

    Nothing is read back to the host.
    """
    shape, length = draft_tokens.shape[:-1], draft_tokens.shape[-1]
    batch = shape.numel()  # spelled out, since -1 is ambiguous when nothing is drafted
    _check_shapes(target_probs, draft_probs, draft_tokens)
    if isinstance(randomness, torch.Generator):
        randomness = _make_uniforms(draft_tokens, randomness)
    target = target_probs.reshape(batch, length + 1, target_probs.shape[-1])
    draft = None if draft_probs is None else draft_probs.reshape(batch, length, target.shape[-1])
    tokens = draft_tokens.reshape(batch, length)
    offered = tokens.new_full((batch,), length) if num_drafted is None else num_drafted.reshape(batch)

    if offered.device.type == "cpu":  # elsewhere it would have to be read back
        _check_values(tokens, offered, target.shape[-1])
    uniforms = Uniforms(randomness.accept.reshape(batch, length), randomness.next_token.reshape(batch))
    verdict = _decide(target, draft, tokens, uniforms, offered)
    return Verdict(verdict.num_accepted.reshape(shape), verdict.next_token.reshape(shape))


def _decide(target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, offered: Tensor) -> Verdict:
    """By our kernel, row by row in NumPy, or all rows at once: the same rule. Shapes as in `verify_on_device`."""
    ours = reading(target, draft)
    if ours is not None and target.dtype is torch.float32 and (draft is None or draft.dtype is torch.float32):
        accept, last = randomness.accept.double(), randomness.next_token.double()
        return Verdict(*ours.verify(target, draft, tokens.long(), offered.long(), accept, last))
    if row_by_row(target):
        return verify_on_host(target, draft, tokens, randomness, offered)
    return verify_on_device(target, draft, tokens, randomness, offered)


def verify_on_device(target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, offered: Tensor) -> Verdict:
    """All rows at once, without reading anything back. [B, K+1, V], [B, K, V], int64 [B, K], [B, K] and [B], int64 [B]"""
    accepted = _accepted(target, draft, tokens, randomness.accept)
    accepted = accepted & (torch.arange(tokens.shape[-1], device=tokens.device) < offered.unsqueeze(-1))
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    return Verdict(num_accepted, next_on_device(target, draft, tokens, num_accepted, offered, randomness.next_token))


def _accepted(target: Tensor, draft: Tensor | None, tokens: Tensor, uniforms: Tensor) -> Tensor:
    """U · draft(x) < target(x), which is u < target / draft without the division: never true where target(x) = 0.

    Nor where draft(x) is 0 or NaN: x was not drawn from that law then, but stands for one that could not be drawn from.
    """
    index = tokens.unsqueeze(-1)
    target_mass = target[:, :-1].gather(-1, index).squeeze(-1).double()
    if draft is None:
        return uniforms < target_mass
    draft_mass = draft.gather(-1, index).squeeze(-1).double()
    return (uniforms.to(draft_mass) * draft_mass < target_mass) & (draft_mass > 0)


def verify_on_host(target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, offered: Tensor) -> Verdict:
    """The same, row by row in NumPy, token by token up to the first rejection.

    Beside a model whose weights have just swept the caches it is the number of operations that costs, and NumPy's are
    lighter than torch's; nothing of the size of a vocabulary is made but a residual.
    """
    laws, drafts = on_host(target), None if draft is None else on_host(draft)
    accept, last = randomness.accept.tolist(), randomness.next_token.tolist()
    counts, following = [], []
    for i, (row, drafted) in enumerate(zip(tokens.tolist(), offered.tolist(), strict=True)):
        own = None if drafts is None else drafts[i]
        count = _accepted_on_host(laws[i], own, row[:drafted], accept[i])
        counts.append(count)
        weights = laws[i, count]
        token = -1
        if count < drafted:
            if own is None:
                residual = weights.copy()
                residual[row[count]] = 0.0
            else:
                residual = np.maximum(weights - own[count], 0.0)
            token = draw_on_host(residual, last[i])
        following.append(token if token >= 0 else draw_on_host(weights, last[i]))  # nothing left but rounding: see below
    return Verdict(torch.tensor(counts, dtype=torch.long), torch.tensor(following, dtype=torch.long))


def _accepted_on_host(laws: NDArray[Any], draft: NDArray[Any] | None, tokens: list[int], uniforms: list[float]) -> int:
    """How many tokens are accepted: see `_accepted`. [.., V], [.., V]"""
    for place, (token, uniform) in enumerate(zip(tokens, uniforms, strict=False)):
        mass = float(laws[place, token])
        if draft is None:
            kept = uniform < mass
        else:
            offered = float(draft[place, token])
            kept = offered > 0.0 and uniform * offered < mass
        if not kept:
            return place
    return len(tokens)


def next_on_device(
    target: Tensor, draft: Tensor | None, tokens: Tensor, num_accepted: Tensor, offered: Tensor, uniforms: Tensor
) -> Tensor:
    """The token after the accepted ones, without reading anything back. → [B]"""
    return draw(_next_weights(target, draft, tokens, num_accepted, offered), uniforms)


def _next_weights(target: Tensor, draft: Tensor | None, tokens: Tensor, num_accepted: Tensor, offered: Tensor) -> Tensor:
    """The unnormalised law of the token after the accepted ones: (target - draft)+ or target. [B, V]"""
    rows = torch.arange(len(target), device=target.device)
    weights = target[rows, num_accepted]
    if tokens.shape[-1] == 0:
        return weights
    rejected = (num_accepted < offered).unsqueeze(-1)
    at = num_accepted.clamp(max=tokens.shape[-1] - 1)
    if draft is None:
        token = tokens[rows, at].unsqueeze(-1)
        residual = weights.scatter(-1, token, 0.0)
    else:
        residual = (weights - draft[rows, at]).clamp(min=0.0)
    # A rejection means that the draft outweighs the target somewhere, hence the target outweighs it elsewhere; only
    # rounding (both sum to 1 ± 1e-7) can leave nothing, and then the two laws are equal to that precision.
    use_residual = rejected & (residual.sum(-1, keepdim=True) > 0)
    return torch.where(use_residual, residual, weights)


def _make_uniforms(tokens: Tensor, generator: torch.Generator) -> Uniforms:
    shape = (*tokens.shape[:-1], tokens.shape[-1] + 1)
    values = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device).to(tokens.device)
    return Uniforms(accept=values[..., :-1], next_token=values[..., -1])


def _check_values(tokens: Tensor, offered: Tensor, vocabulary: int) -> None:
    """Raise `ParameterError` unless every row offers 0 … K tokens, each of the vocabulary."""
    length = tokens.shape[-1]
    wrong = [count for count in offered.tolist() if not 0 <= count <= length]
    if wrong:
        raise ParameterError(f"num_drafted must be in 0 … {length}, got {wrong[0]}")
    rows = zip(tokens.tolist(), offered.tolist(), strict=True)
    outside = [token for row, count in rows for token in row[:count] if not 0 <= token < vocabulary]
    if outside:
        raise ParameterError(f"draft_tokens must be in 0 … {vocabulary - 1}, got {outside[0]}")


def _check_shapes(target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Tensor) -> None:
    *batch, length = draft_tokens.shape
    vocabulary = target_probs.shape[-1]
    if list(target_probs.shape[:-1]) != [*batch, length + 1]:
        wanted = f"[{', '.join(map(str, [*batch, length + 1]))}, V]"
        raise ParameterError(f"target_probs must be {wanted} for {length} draft tokens, got {list(target_probs.shape)}")
    expected = [*batch, length, vocabulary]
    if draft_probs is not None and list(draft_probs.shape) != expected:
        given = list(draft_probs.shape)
        raise ParameterError(f"draft_probs must be {expected}, got {given}: fit the vocabularies first")
