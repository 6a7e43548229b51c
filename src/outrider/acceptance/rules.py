"""Two other exact rules, for study only: both keep the target's law and accept less than `verify`. Nothing decodes by them.

`verify_match` is what llama.cpp and mlx-lm do: draw from the target, keep the draft's token if it is the same (the notes'
"naive" rule); accepts with probability sum target · draft. `verify_rejection` is rejection sampling in one step
(Leviathan A.2): accept with target / (M · draft), M = max target / draft, otherwise draw from the unmodified target;
accepts with probability 1 / M. Their expected acceptances are in `theory`. Signatures are those of `verify.verify`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.acceptance.verify import Uniforms, Verdict
from outrider.errors import ParameterError
from outrider.sampling.draw import draw


def verify_match(target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Tensor, randomness: Uniforms) -> Verdict:
    """Draw every position from the target and keep the prefix that agrees. Shapes as in `verify`.

    The uniforms draw the target's tokens: accept [.., K] at the drafted positions, next_token [..] after them.
    `draft_probs` plays no part.
    """
    del draft_probs
    uniforms = torch.cat([randomness.accept, randomness.next_token.unsqueeze(-1)], dim=-1)
    drawn = draw(target_probs, uniforms)
    agreed = (drawn[..., :-1] == draft_tokens).long().cumprod(-1).sum(-1)
    return Verdict(agreed, drawn.gather(-1, agreed.unsqueeze(-1)).squeeze(-1))


def verify_rejection(
    target_probs: Tensor, draft_probs: Tensor | None, draft_tokens: Tensor, randomness: Uniforms
) -> Verdict:
    """One step of rejection sampling per position, then the target itself. Shapes as in `verify`."""
    if draft_probs is None:
        raise ParameterError("draft_probs must be given: plain rejection sampling has no form for a point mass")
    offered = target_probs[..., :-1, :]
    # 0 / 0 has no say in the maximum; x / 0 is infinite: nothing can be accepted then, and the rule stays exact.
    bound = torch.where(offered > 0, offered / draft_probs, 0.0).amax(-1)
    index = draft_tokens.unsqueeze(-1)
    target_mass = offered.gather(-1, index).squeeze(-1)
    draft_mass = draft_probs.gather(-1, index).squeeze(-1)
    accepted = randomness.accept * bound * draft_mass < target_mass
    num_accepted = (accepted & bound.isfinite()).long().cumprod(-1).sum(-1)
    index = num_accepted[..., None, None].expand(*num_accepted.shape, 1, target_probs.shape[-1])
    row = target_probs.gather(-2, index).squeeze(-2)
    return Verdict(num_accepted, draw(row, randomness.next_token))
