"""Faults that speculative decoders have had, as laws: what a token would follow if the engine had the fault.

From the target's law p and the draft's law q at a position that is tested (Leviathan: p target, q draft), the fault's law is
known in closed form. Tokens drawn from it in place of the real ones tell whether an audit of this size would have noticed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Fault = Callable[[Tensor, Tensor], Tensor]
"""(target law, draft law), [n, V] each → the law of the fault [n, V]"""


def _mended(kept: Tensor, residual: Tensor) -> Tensor:
    """What is kept of the draft, and the rest of the mass by a residual (the weights of the recovered token)."""
    missing = (1.0 - kept.sum(-1, keepdim=True)).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    return kept + missing * torch.where(mass > 0, residual / mass, 0.0)


def everything_accepted(target: Tensor, draft: Tensor) -> Tensor:
    """No test at all."""
    del target
    return draft


def recovered_from_target(target: Tensor, draft: Tensor) -> Tensor:
    """After a rejection the token is drawn from the target, not from (target - draft)+."""
    return _mended(torch.minimum(target, draft), target)


def recovered_from_draft(target: Tensor, draft: Tensor) -> Tensor:
    """The residual the wrong way round, (draft - target)+."""
    return _mended(torch.minimum(target, draft), (draft - target).clamp(min=0))


def ratio_upside_down(target: Tensor, draft: Tensor) -> Tensor:
    """Accepted with min(1, draft / target)."""
    accept = torch.where(target > 0, draft / target, 1.0).clamp(max=1.0)
    return _mended(draft * accept, (target - draft).clamp(min=0))


def argmax_draft(target: Tensor, draft: Tensor) -> Tensor:
    """The draft proposes its best token, and is tested as if it had been drawn."""
    best = draft.argmax(-1, keepdim=True)
    accept = (target.gather(-1, best) / draft.gather(-1, best)).clamp(max=1.0)
    kept = torch.zeros_like(target).scatter_(-1, best, accept)
    return _mended(kept, (target - draft).clamp(min=0))


def lenient(target: Tensor, draft: Tensor) -> Tensor:
    """Accepted with min(1, 2 · target / draft): lenience of one half (Leviathan A.5), undeclared."""
    return _mended(torch.minimum(2.0 * target, draft), (target - draft).clamp(min=0))


def noise_of_the_proposal(target: Tensor, draft: Tensor) -> Tensor:
    """The recovered token is drawn with the number that the proposal was drawn with, both by inversion in order of the ids.

    R(u) is the probability of a rejection with a number below u; a token is recovered with R over its share of the residual.
    """
    rejected = 1.0 - torch.where(draft > 0, target / draft, 1.0).clamp(max=1.0)
    proposed, shares = _cumulated(draft), _residual_shares(target, draft)
    risk = torch.nn.functional.pad((draft.double() * rejected.double()).cumsum(-1), (1, 0))
    at = (torch.searchsorted(proposed, shares, right=True) - 1).clamp(0, draft.shape[-1] - 1)
    until = risk.gather(-1, at) + (shares - proposed.gather(-1, at)) * rejected.double().gather(-1, at)
    return torch.minimum(target, draft) + until.diff(dim=-1).clamp(min=0).to(target.dtype)


def noise_of_the_rejection(target: Tensor, draft: Tensor) -> Tensor:
    """The recovered token is drawn with the number that rejected the proposal.

    W(u) = sum over proposals x of draft(x) · (u - threshold(x))+ is the probability of a rejection with a number below u.
    """
    threshold = torch.where(draft > 0, target / draft, 1.0).clamp(max=1.0).double()
    edges, order = threshold.sort(-1)
    mass = draft.double().gather(-1, order)
    weight = torch.nn.functional.pad(mass.cumsum(-1), (1, 0))
    moment = torch.nn.functional.pad((mass * edges).cumsum(-1), (1, 0))
    shares = _residual_shares(target, draft)
    at = torch.searchsorted(edges.contiguous(), shares)
    until = shares * weight.gather(-1, at) - moment.gather(-1, at)
    return torch.minimum(target, draft) + until.diff(dim=-1).clamp(min=0).to(target.dtype)


def _cumulated(law: Tensor) -> Tensor:
    """[n, V] → [n, V + 1], from 0 to 1, float64"""
    total = torch.nn.functional.pad(law.double().cumsum(-1), (1, 0))
    return total / total[:, -1:].clamp(min=1e-300)


def _residual_shares(target: Tensor, draft: Tensor) -> Tensor:
    return _cumulated((target - draft).clamp(min=0))


FAULTS: dict[str, Fault] = {
    "every draft token accepted": everything_accepted,
    "recovered token drawn from the target": recovered_from_target,
    "recovered token drawn from the draft": recovered_from_draft,
    "acceptance ratio upside down": ratio_upside_down,
    "argmax draft tested as a drawn one": argmax_draft,
    "lenience of one half": lenient,
    "noise of the proposal used again": noise_of_the_proposal,
    "noise of the rejection used again": noise_of_the_rejection,
}


def _from_the_draft(target: Tensor, draft: Tensor, before: Tensor) -> Tensor:
    del target, before
    return draft


def _greedy(target: Tensor, draft: Tensor, before: Tensor) -> Tensor:
    del draft, before
    return torch.zeros_like(target).scatter_(-1, target.argmax(-1, keepdim=True), 1.0)


def _of_the_row_before(target: Tensor, draft: Tensor, before: Tensor) -> Tensor:
    del target, draft
    return before


BONUS_FAULTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bonus token drawn from the draft": _from_the_draft,
    "bonus token drawn greedily": _greedy,
    "bonus token of the row before": _of_the_row_before,
}
"""(target law, draft law, target law of the position before), [n, V] each → the law of the fault [n, V]"""


def fault_law(fault: Fault, target: Tensor, draft: Tensor, tested: Tensor) -> Tensor:
    """The law of a fault where the rule decides; the target's elsewhere. tested: bool [n] → [n, V]"""
    known = (tested & ~draft[:, 0].isnan()).nonzero().squeeze(-1)
    law = target.clone()
    law[known] = fault(target[known], draft[known])
    return law


def bonus_law(
    fault: Callable[[Tensor, Tensor, Tensor], Tensor], target: Tensor, draft: Tensor, bonus: Tensor
) -> tuple[Tensor, Tensor]:
    """The law of a fault of bonus tokens, the target's elsewhere; and where it is the fault's. bonus: [n] → [n, V], [n]"""
    where = bonus & ~draft[:, 0].isnan()
    where[:1] = False  # the row before the first one is not here
    known = where.nonzero().squeeze(-1)
    law = target.clone()
    law[known] = fault(target[known], draft[known], target[known - 1])
    return law, where
