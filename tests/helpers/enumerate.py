"""The law of an acceptance rule, computed exactly, on toy vocabularies: every draft, every outcome.

The rule is a black box that maps uniforms to an outcome. Where its decisions flip is found by bisection to the last bit, so
that nothing about how the rule computes is assumed, only that it decides about each row by itself, that each acceptance is a
threshold on its own uniform and that the token after it is monotone in its uniform, as any inversion of a cumulative sum is.
Noise that one decision shares with another shows as well: the next token's law is taken at several places inside each
rejection.

A round of K drafted tokens yields 1 … K+1 tokens. Completed to K+1 by the target's own law, their joint law must be the
target's (Chen Theorem 1, Leviathan A.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.acceptance.verify import Uniforms, Verdict

Law = Callable[[tuple[int, ...]], Tensor]
"""The law of the next token after these new tokens. → [V], float64"""
Rule = Callable[[Tensor, Tensor | None, Tensor, Uniforms], Verdict]
_STEPS = 54
_INSIDE = (0.03, 0.5, 0.97)


@dataclass(frozen=True)
class _Drafts:
    """All drafts of a toy: tokens [D, K], their probability [D], the laws along each: target [D, K+1, V], draft."""

    tokens: Tensor
    mass: Tensor
    target: Tensor
    draft: Tensor | None

    def repeated(self, times: int) -> _Drafts:
        """All of them so many times, one after the other: a call of the rule for each would take most of the time."""
        draft = None if self.draft is None else self.draft.repeat(times, 1, 1)
        return _Drafts(self.tokens.repeat(times, 1), self.mass.repeat(times), self.target.repeat(times, 1, 1), draft)


def target_joint(target: Law, vocabulary: int, length: int) -> Tensor:
    """The target's joint law of `length` tokens. → [V, …, V]"""
    joint = torch.ones((), dtype=torch.float64)
    for done in range(length):
        laws = [target(prefix) for prefix in itertools.product(range(vocabulary), repeat=done)]
        joint = joint.unsqueeze(-1) * torch.stack(laws).reshape(*[vocabulary] * done, vocabulary)
    return joint


def round_joint(rule: Rule, target: Law, draft: Law | int | None, vocabulary: int, length: int) -> Tensor:
    """The joint law of K + 1 tokens when the first round drafts K = `length`. → [V, …, V]

    draft: the drafter's law, from which tokens are drawn, or a token that a deterministic drafter repeats.
    """
    drafts = _enumerate(target, draft, vocabulary, length)
    accept = _acceptances(rule, drafts)
    reached = torch.cat([torch.ones_like(drafts.mass).unsqueeze(-1), accept.cumprod(-1)], dim=-1)
    joint = torch.zeros([vocabulary] * (length + 1), dtype=torch.float64)
    for accepted, following in enumerate(_next_laws(rule, drafts, accept)):
        stopped = reached[:, accepted] * (1.0 - accept[:, accepted] if accepted < length else 1.0)
        block = torch.zeros([vocabulary] * (accepted + 1), dtype=torch.float64)
        for i, tokens in enumerate(drafts.tokens.tolist()):
            block[tuple(tokens[:accepted])] += drafts.mass[i] * stopped[i] * following[i]
        joint += _complete(block, target, vocabulary, length + 1)
    return joint


def _enumerate(target: Law, draft: Law | int | None, vocabulary: int, length: int) -> _Drafts:
    if callable(draft):
        every = list(itertools.product(range(vocabulary), repeat=length))
    else:
        every = [(0 if draft is None else draft,) * length]
    tokens = torch.tensor(every, dtype=torch.long).reshape(len(every), length)
    laws = torch.stack([torch.stack([target(d[:j]) for j in range(length + 1)]) for d in every])
    if not callable(draft) or length == 0:
        return _Drafts(tokens, torch.ones(len(every), dtype=torch.float64), laws, None)
    drafted = torch.stack([torch.stack([draft(d[:j]) for j in range(length)]) for d in every])
    mass = drafted.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).prod(-1)
    return _Drafts(tokens, mass, laws, drafted)


def _acceptances(rule: Rule, drafts: _Drafts) -> Tensor:
    """The probability that each drafted token is accepted once those before it are. [D, K]"""
    count, length = drafts.tokens.shape
    every = drafts.repeated(length)
    at = torch.arange(length).repeat_interleave(count)

    def rejected(point: Tensor) -> Tensor:
        uniforms = torch.zeros(length * count, length, dtype=torch.float64)
        uniforms.scatter_(-1, at.unsqueeze(-1), point.unsqueeze(-1))
        outcome = rule(every.target, every.draft, every.tokens, Uniforms(uniforms, torch.zeros_like(point)))
        return outcome.num_accepted <= at

    return _flip(rejected, length * count).view(length, count).T if length else torch.zeros(count, 0, dtype=torch.float64)


def _next_laws(rule: Rule, drafts: _Drafts, accept: Tensor) -> list[Tensor]:
    """The law of the token after each number of accepted ones, averaged over places inside the rejection. K + 1 × [D, V]"""
    count, length = drafts.tokens.shape
    vocabulary = drafts.target.shape[-1]
    rows = []
    for accepted in range(length + 1):
        places = _INSIDE if accepted < length else _INSIDE[:1]
        uniforms = torch.zeros(len(places), vocabulary, count, length, dtype=torch.float64)
        if accepted < length:
            inside = torch.tensor(places, dtype=torch.float64).view(-1, 1, 1)
            uniforms[..., accepted] = accept[:, accepted] + inside * (1.0 - accept[:, accepted])
        rows.append(uniforms)
    sizes = [len(part) for part in rows]
    uniforms = torch.cat(rows).flatten(0, 2)
    every = drafts.repeated(sum(sizes) * vocabulary)
    token = torch.arange(vocabulary).view(1, -1, 1).expand(sum(sizes), vocabulary, count).reshape(-1)

    def above(point: Tensor) -> Tensor:
        return rule(every.target, every.draft, every.tokens, Uniforms(uniforms, point)).next_token > token

    edges = _flip(above, len(token)).view(sum(sizes), vocabulary, count).transpose(1, 2)
    laws = torch.nn.functional.pad(edges, (1, 0)).diff(dim=-1)
    return [part.mean(0) for part in torch.split(laws, sizes)]


def _flip(turned: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """The infimum of the points in [0, 1) at which `turned` holds, 1 if it never does. [count]"""
    low = torch.zeros(count, dtype=torch.float64)
    high = torch.ones(count, dtype=torch.float64)
    high = torch.where(turned(low), low, high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        inside = turned(middle.clamp(max=1.0 - 2.0**-53))
        high = torch.where(inside & (middle < high), middle, high)
        low = torch.where(inside, low, middle.clamp(max=high))
    return high


def _complete(block: Tensor, target: Law, vocabulary: int, length: int) -> Tensor:
    """Extend a joint law of some tokens to `length` tokens by the target's own law."""
    while block.dim() < length:
        done = block.dim()
        laws = [target(prefix) for prefix in itertools.product(range(vocabulary), repeat=done)]
        block = block.unsqueeze(-1) * torch.stack(laws).reshape(*[vocabulary] * done, vocabulary)
    return block
