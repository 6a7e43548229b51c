"""Lenience (Leviathan A.5): accept more than the exact rule does. LOSSY: the output's law is no longer the target's.

Notation of the papers: p the target's law, q the draft's, l in (0, 1] the lenience; l = 1 is `verify`'s exact rule.

*Stochastic* (`verify_lenient`): accept the drafted token x with min(1, p(x) / (l q(x))). It is then accepted with
probability a(x) = min(p(x) / l, q(x)) in all; alpha_l = sum a. A.5 promises that no token gets more than p / l but does not
say what is drawn after a rejection, and not every law keeps that promise: drawing from p itself gives a token with
q >= p / l the probability p / l + (1 - alpha_l) p. The recovered token's law r must satisfy, for every x,

    (1 - alpha_l) r(x)  <=  p(x) / l - a(x)  =  (p(x) / l - q(x))+                                                    (1)

Among those we take the one that leaves the output nearest to p. A token is short of p by (p - a)+ = (p - q)+ (where a < p
it is q, as p / l >= p), in all 1 - alpha_1 >= 1 - alpha_l, which is what is left to give. So the residual of the exact rule,
unchanged, r = (p - q)+ / (1 - alpha_1), fills no token beyond p: with k = (1 - alpha_l) / (1 - alpha_1) <= 1 the law is

    s(x) = q(x) + k (p(x) - q(x)) <= p(x)  where q <= p,         s(x) = min(p(x) / l, q(x)) <= p(x) / l  elsewhere,     (2)

which implies (1). Its total variation from p is alpha_l - alpha_1, the least possible, since acceptance alone puts that
much above p. (Algorithm 1 with l q for q throughout, residual (p - l q)+, satisfies (1) too, but puts more above p.) The
bound holds for the law of each token given those before it, so p / l^n for n of them; bonus tokens follow p.

*Greedy* (`verify_near_best`): at temperature 0 p is one-hot and l would change nothing, so A.5 compares the law *before* it
is made one-hot: accept x if p(x) >= l max p, p at temperature 1 after bias, penalties and processors (A.5 prints the
inequality the other way round). After a rejection, and after a fully accepted draft, comes the target's best token.

Both are pure functions of tensors, like `verify`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.acceptance.verify import Uniforms, Verdict, verify
from outrider.sampling.draw import draw
from outrider.settings.drafting import check_lenience
from outrider.theory import lenient_acceptance_probability


def verify_lenient(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    randomness: Uniforms,
    num_drafted: Tensor | None = None,
    lenience: float = 1.0,
) -> Verdict:
    """Accept with min(1, target / (lenience · draft)); recover from (target - draft)+. Shapes as in `verify`.

    `Verdict.lenient` says which tokens the exact rule would have rejected with the same uniforms.
    """
    check_lenience(lenience)
    # u · l · draft < target: the exact rule with smaller uniforms, its residual untouched.
    eased = Uniforms(randomness.accept * lenience, randomness.next_token)
    verdict = verify(target_probs, draft_probs, draft_tokens, eased, num_drafted)
    index = draft_tokens.unsqueeze(-1)
    target_mass = target_probs[..., :-1, :].gather(-1, index).squeeze(-1).double()
    draft_mass = 1.0 if draft_probs is None else draft_probs.gather(-1, index).squeeze(-1).double()
    exact = randomness.accept * draft_mass < target_mass
    return Verdict(verdict.num_accepted, verdict.next_token, _kept(draft_tokens, verdict.num_accepted) & ~exact)


def verify_near_best(
    target_probs: Tensor,
    soft_probs: Tensor,
    draft_tokens: Tensor,
    randomness: Uniforms,
    num_drafted: Tensor | None = None,
    lenience: float = 1.0,
) -> Verdict:
    """Accept tokens whose soft probability is at least lenience times the greatest. Shapes as in `verify`.

    target_probs: one-hot. soft_probs: [.., K+1, V], the target's law before it was made one-hot (`soft`). How the tokens
    were drafted plays no part, and after them comes the one-hot law's token, whatever came before.
    """
    check_lenience(lenience)
    length, index = draft_tokens.shape[-1], draft_tokens.unsqueeze(-1)
    best = target_probs[..., :-1, :].gather(-1, index).squeeze(-1) > 0
    accepted = best | near_best(soft_probs[..., :-1, :], lenience).gather(-1, index).squeeze(-1)
    if num_drafted is not None:
        accepted = accepted & (torch.arange(length, device=index.device) < num_drafted.unsqueeze(-1))
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    at = num_accepted[..., None, None].expand(*num_accepted.shape, 1, target_probs.shape[-1])
    next_token = draw(target_probs.gather(-2, at).squeeze(-2), randomness.next_token)
    return Verdict(num_accepted, next_token, _kept(draft_tokens, num_accepted) & ~best)


def _kept(tokens: Tensor, num_accepted: Tensor) -> Tensor:
    """Which drafted tokens were accepted. bool [.., K]"""
    return torch.arange(tokens.shape[-1], device=tokens.device) < num_accepted.unsqueeze(-1)


def near_best(soft_probs: Tensor, lenience: float) -> Tensor:
    """Which tokens have at least lenience times the greatest probability, and one at all. [.., V] → bool [.., V]"""
    return (soft_probs >= lenience * soft_probs.amax(-1, keepdim=True)) & (soft_probs > 0)


def lenient_law(target_probs: Tensor, draft_probs: Tensor, lenience: float) -> Tensor:
    """The law s of a token at a tested position, Equation (2) above. [.., V], [.., V] → [.., V], float64

    Where draft and target are equal there is nothing to recover, and s is the target.
    """
    p, q = target_probs.double(), draft_probs.double()
    kept = torch.minimum(p / lenience, q)
    residual = (p - q).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    missing = (1.0 - kept.sum(-1, keepdim=True)).clamp(min=0)
    return kept + missing * torch.where(mass > 0, residual / mass, p)


def lenient_betas(target_probs: Tensor, draft_probs: Tensor, lenience: float, soft_probs: Tensor | None = None) -> Tensor:
    """The probability that a drafted token is accepted: sum min(target / l, draft); greedy, the draft's mass near the best.

    [.., V], [.., V] → [..]
    """
    if soft_probs is None:
        return lenient_acceptance_probability(target_probs, draft_probs, lenience)
    return (draft_probs * near_best(soft_probs, lenience)).sum(-1)
