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


FAULTS: dict[str, Fault] = {
    "every draft token accepted": everything_accepted,
    "recovered token drawn from the target": recovered_from_target,
    "recovered token drawn from the draft": recovered_from_draft,
    "acceptance ratio upside down": ratio_upside_down,
    "argmax draft tested as a drawn one": argmax_draft,
    "lenience of one half": lenient,
}


def fault_law(fault: Fault, target: Tensor, draft: Tensor, tested: Tensor) -> Tensor:
    """The law of a fault where the rule decides; the target's elsewhere. tested: bool [n] → [n, V]"""
    known = (tested & ~draft[:, 0].isnan()).unsqueeze(-1)
    return torch.where(known, fault(target, torch.where(known, draft, target)), target)
