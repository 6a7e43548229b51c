"""The rule that no draft has a say in: drafter-invariant speculative decoding (Daliri, Musco, Suresh 2025).

The target draws every position by the race of that position (`sampling.race`), and the draft is kept as far as it says the
same. What comes out is a function of the target, the prompt and the row's key alone: plain decoding gives it, any drafter
gives it, at any draft length. So it has the target's law, whatever the draft was and knew, the very numbers included; laws
of the draft are not even asked for.

A draft that races with the same numbers agrees with probability sum_x 1 / sum_y max(p(y) / p(x), q(y) / q(x))
(`theory.race_acceptance_probability`), where the ratio rule accepts with sum min(p, q); a draft that is certain agrees with
probability p(x), which is also the ratio rule's.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from outrider.acceptance.verify import Verdict
from outrider.sampling.race import race


def verify_by_position(
    target_probs: Tensor, draft_tokens: Tensor, keys: Many[int], positions: Many[int], num_drafted: Tensor
) -> Verdict:
    """Keep what agrees with the target's races; the token after it is the next race's.

    target_probs: [B, K+1, V], draft_tokens: int64 [B, K], num_drafted: int64 [B], as in `verify`. keys, positions: of each
    row its stream's, and that of the first drafted token. Nothing is read back to the host.
    """
    batch, places, vocabulary = target_probs.shape
    each = [key for key in keys for _ in range(places)]
    at = [position + n for position in positions for n in range(places)]
    said = race(target_probs.reshape(batch * places, vocabulary), each, at).view(batch, places)
    offered = torch.arange(places - 1, device=said.device) < num_drafted.unsqueeze(-1)
    agreed = ((said[:, :-1] == draft_tokens) & offered).long().cumprod(-1).sum(-1)
    return Verdict(agreed, said.gather(-1, agreed.unsqueeze(-1)).squeeze(-1))
