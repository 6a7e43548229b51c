"""What the ratio rule would accept along a known text."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters import Drafter
from outrider.forced import pairs_along
from outrider.models.base import LanguageModel
from outrider.sampling import SamplingSettings
from outrider.theory import acceptance_probability


def betas_along(
    drafter: Drafter, target: LanguageModel, tokens: Sequence[int], prompt_length: int, sampling: SamplingSettings
) -> list[float]:
    """Sum min(target, draft) at each new token (Leviathan Theorem 3.5); NaN where nothing is proposed."""
    pairs = pairs_along(drafter, target, tokens, prompt_length, sampling)
    return [beta for pair in pairs for beta in acceptance_probability(*pair).tolist()]
