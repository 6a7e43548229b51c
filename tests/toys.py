"""Toy laws for exact tests: small random tables, sampling settings, and the bugs that the tests must catch."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.audit.enumerate import Law
from outrider.models.table import TableModel
from outrider.sampling import Context, SamplingSettings, standardize
from outrider.sampling.draw import draw
from outrider.verify import Uniforms, Verdict, verify

PROMPT = (0, 1)

SETTINGS = {
    "greedy": SamplingSettings(),
    "temperature 1": SamplingSettings(temperature=1.0),
    "temperature 0.6": SamplingSettings(temperature=0.6),
    "temperature 1.7": SamplingSettings(temperature=1.7),
    "top-k": SamplingSettings(temperature=1.0, top_k=2),
    "top-p": SamplingSettings(temperature=1.0, top_p=0.7),
    "min-p": SamplingSettings(temperature=1.0, min_p=0.4),
    "bias": SamplingSettings(temperature=1.0, logit_bias={0: -float("inf"), 1: 0.7}),
    "penalties": SamplingSettings(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "all": SamplingSettings(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.2),
}


def table(seed: int, vocabulary: int, order: int = 2, sharpness: float = 2.0) -> TableModel:
    """A random Markov model in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn([vocabulary] * (order + 1), generator=generator, dtype=torch.float64)
    return TableModel(logits.softmax(-1), name=f"table-{seed}")


def law_of(model: TableModel, settings: SamplingSettings) -> Law:
    """The standardised law of the next token after PROMPT and some new tokens."""

    def law(new: tuple[int, ...]) -> Tensor:
        tokens = [*PROMPT, *new]
        context = Context(torch.tensor(tokens), len(PROMPT))
        return standardize(model.probs_after(tokens).log().unsqueeze(0), settings, [context])[0]

    return law


# The planted bugs. Each has the signature of `verify`.


def always_accept(
    target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, drafted: Tensor | None = None
) -> Verdict:
    everything = torch.full_like(randomness.accept, 0.0)
    sure = torch.full_like(target, 1.0)
    sure[..., -1, :] = target[..., -1, :]
    return verify(sure, draft, tokens, Uniforms(everything, randomness.next_token), drafted)


def residual_is_target(
    target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, drafted: Tensor | None = None
) -> Verdict:
    accepted = verify(target, draft, tokens, randomness, drafted).num_accepted
    index = accepted[..., None, None].expand(*accepted.shape, 1, target.shape[-1])
    return Verdict(accepted, draw(target.gather(-2, index).squeeze(-2), randomness.next_token))


def ratio_upside_down(
    target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, drafted: Tensor | None = None
) -> Verdict:
    if draft is None:
        return verify(target, draft, tokens, randomness, drafted)
    offered = target[..., :-1, :]
    swapped = verify(torch.cat([draft, target[..., -1:, :]], dim=-2), offered, tokens, randomness, drafted)
    accepted = swapped.num_accepted
    index = accepted[..., None, None].expand(*accepted.shape, 1, target.shape[-1])
    padded = torch.cat([draft, torch.zeros_like(target[..., -1:, :])], dim=-2)
    residual = (target - padded).clamp(min=0).gather(-2, index).squeeze(-2)
    return Verdict(accepted, draw(residual, randomness.next_token))


def reused_noise(
    target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, drafted: Tensor | None = None
) -> Verdict:
    """The recovered token is drawn with the number that rejected the draft."""
    accepted = verify(target, draft, tokens, randomness, drafted).num_accepted
    every = torch.cat([randomness.accept, randomness.next_token.unsqueeze(-1)], dim=-1)
    noise = every.gather(-1, accepted.unsqueeze(-1)).squeeze(-1)
    return verify(target, draft, tokens, Uniforms(randomness.accept, noise), drafted)


def recovers_the_rejected(
    target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, drafted: Tensor | None = None
) -> Verdict:
    """The residual by list position, one row too early."""
    if draft is None:
        return verify(target, draft, tokens, randomness, drafted)
    good = verify(target, draft, tokens, randomness, drafted)
    at = (good.num_accepted - 1).clamp(min=0)
    index = at[..., None, None].expand(*at.shape, 1, target.shape[-1])
    padded = torch.cat([draft, torch.zeros_like(target[..., -1:, :])], dim=-2)
    residual = (target - padded).clamp(min=0).gather(-2, index).squeeze(-2)
    bonus = good.num_accepted == tokens.shape[-1]
    return Verdict(good.num_accepted, torch.where(bonus, good.next_token, draw(residual, randomness.next_token)))


WRONG_RULES = {
    "always accept": always_accept,
    "residual = target": residual_is_target,
    "ratio upside down": ratio_upside_down,
    "reused noise": reused_noise,
    "residual of another position": recovers_the_rejected,
}
