"""How far a draft's law is from the target's, per position. Both losses look at the head's own tokens only.

kl: forward Kullback–Leibler, as cross-entropy with the target's probabilities (soft targets; they differ by the target's
entropy, which no weight changes). tv: total variation D_LK = 1 - sum min(target, draft) (Leviathan 3.3), which is 1 - alpha
itself: what the target gives to tokens outside the head's vocabulary counts as lost. mix: their sum; tv alone has next to no
gradient where the draft is far off.
"""

from __future__ import annotations

from typing import Literal, get_args

from outrider.errors import ParameterError

Loss = Literal["kl", "tv", "mix"]
LOSSES: tuple[Loss, ...] = get_args(Loss)


def check_loss(name: str) -> Loss:
    """The loss of that name."""
    for loss in LOSSES:
        if loss == name:
            return loss
    raise ParameterError(f"loss must be {', '.join(LOSSES[:-1])} or {LOSSES[-1]}, got {name!r}")
