"""How a draft would fare on a known text of the target: alpha, and the chance of every token to be accepted.

A drafted token is accepted with min(1, target / draft). Given that the text goes on with x, the draft's token was x and kept
with probability min(1, draft(x) / target(x)) (Bayes; the sum over the text's law is Leviathan's beta, Theorem 3.5). For a
point mass this is 1 if it says x and 0 otherwise. So one pass over a text of the target gives, without bias and without
the assumption of equal chances, what any draft length would have done along it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from outrider.drafters import Drafter, ModelDrafter
from outrider.forced import draft_laws_along, point_drafts_along, target_laws_along
from outrider.models.base import LanguageModel, Source
from outrider.sampling import SamplingSettings
from outrider.theory import acceptance_probability

LONGEST = 16


@dataclass(frozen=True)
class Chances:
    """One text and one drafter.

    accept: for every new position t, the chances of the tokens of a draft that begins there, at most `LONGEST`, as long as
    the drafter would propose any. betas: sum min(target, draft) at each position with a proposal.
    """

    prompt_length: int
    accept: tuple[tuple[float, ...], ...]
    betas: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return len(self.accept)


def chances(
    drafter: Drafter,
    target: LanguageModel,
    tokens: Many[int],
    prompt_length: int,
    sampling: SamplingSettings,
    source: Source | None = None,
) -> Chances:
    """One pass of the target (and of the draft, if it is a model). `drafter` must be bound to `target`.

    source: what the encoder of an encoder-decoder reads.
    """
    if not isinstance(drafter, ModelDrafter):
        drafts = point_drafts_along(drafter, target, tokens, prompt_length, sampling, LONGEST, source)
        if drafts is not None:
            return _of_points(drafts, target, tokens, prompt_length, sampling, source)
    alone: list[float] = []
    betas: list[float] = []
    start = prompt_length
    laws = draft_laws_along(drafter, target, tokens, prompt_length, sampling, source)
    for own, law in zip(target_laws_along(target, tokens, prompt_length, sampling, source), laws, strict=True):
        here = torch.tensor(tokens[start : start + len(own)], device=own.device).unsqueeze(-1)
        ratio = law.to(own.dtype).gather(-1, here) / own.gather(-1, here)
        alone += ratio.squeeze(-1).clamp(max=1.0).tolist()  # NaN where nothing is proposed
        beta = acceptance_probability(own, law.to(own.dtype))
        betas += beta[~beta.isnan()].tolist()
        start += len(own)
    return Chances(prompt_length, tuple(_run(alone, t) for t in range(len(alone))), tuple(betas))


def _run(alone: Many[float], start: int) -> tuple[float, ...]:
    """The chances from a position on, until nothing is proposed."""
    ahead = alone[start : start + LONGEST]
    end = next((i for i, chance in enumerate(ahead) if math.isnan(chance)), len(ahead))
    return tuple(ahead[:end])


def _of_points(
    drafts: Many[Many[int]],
    target: LanguageModel,
    tokens: Many[int],
    prompt_length: int,
    sampling: SamplingSettings,
    source: Source | None = None,
) -> Chances:
    new = tokens[prompt_length:]
    accept = tuple(
        tuple(float(drafted == token) for drafted, token in zip(draft, new[t:], strict=False))
        for t, draft in enumerate(drafts)
    )
    betas: list[float] = []
    start = 0
    for own in target_laws_along(target, tokens, prompt_length, sampling, source):
        proposed = [(i, drafts[start + i][0]) for i in range(len(own)) if drafts[start + i]]
        betas += [float(own[i, token]) for i, token in proposed]
        start += len(own)
    return Chances(prompt_length, accept, tuple(betas))
