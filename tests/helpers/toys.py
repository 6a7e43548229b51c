"""Toy laws for exact tests: small random tables, sampling settings, and the bugs that the tests must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from outrider.acceptance.verify import Uniforms, Verdict, verify
from outrider.kernels.calls import SamplingCalls
from outrider.models.table import TableModel
from outrider.proposal import Proposal
from outrider.round import several
from outrider.sampling import Context, SamplingSettings, standardize
from outrider.sampling.draw import draw
from outrider.support.device_data import pad_rows
from tests.helpers.enumerate import Law

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


def table(
    seed: int, vocabulary: int, order: int = 2, sharpness: float = 2.0, dtype: torch.dtype = torch.float64
) -> TableModel:
    """A random Markov model. In float64 rounds go by torch and NumPy, in float32 by our kernels where these are."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn([vocabulary] * (order + 1), generator=generator, dtype=torch.float64)
    return TableModel(logits.softmax(-1).to(dtype), name=f"table-{seed}")


def law_of(model: TableModel, settings: SamplingSettings) -> Law:
    """The standardised law of the next token after PROMPT and some new tokens; each is worked out once."""

    @cache
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


def residual_at(place: Tensor, target: Tensor, draft: Tensor) -> Tensor:
    """max(0, p - q) at one place of each row, p behind the draft. [.., K+1, V], [.., K, V] → [.., V]"""
    index = place[..., None, None].expand(*place.shape, 1, target.shape[-1])
    padded = torch.cat([draft, torch.zeros_like(target[..., -1:, :])], dim=-2)
    return (target - padded).clamp(min=0).gather(-2, index).squeeze(-2)


def ratio_upside_down(
    target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, drafted: Tensor | None = None
) -> Verdict:
    if draft is None:
        return verify(target, draft, tokens, randomness, drafted)
    offered = target[..., :-1, :]
    swapped = verify(torch.cat([draft, target[..., -1:, :]], dim=-2), offered, tokens, randomness, drafted)
    accepted = swapped.num_accepted
    return Verdict(accepted, draw(residual_at(accepted, target, draft), randomness.next_token))


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
    residual = residual_at((good.num_accepted - 1).clamp(min=0), target, draft)
    bonus = good.num_accepted == tokens.shape[-1]
    return Verdict(good.num_accepted, torch.where(bonus, good.next_token, draw(residual, randomness.next_token)))


WRONG_RULES = {
    "always accept": always_accept,
    "residual = target": residual_is_target,
    "ratio upside down": ratio_upside_down,
    "reused noise": reused_noise,
    "residual of another position": recovers_the_rejected,
}


def _wrong_bonus(row: int, greedy: bool) -> Callable[..., Verdict]:
    """A rule that is right but for the token after a fully accepted draft: of another row of laws, or the best one."""

    def rule(
        target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms, drafted: Tensor | None = None
    ) -> Verdict:
        good = verify(target, draft, tokens, randomness, drafted)
        lengths = torch.full_like(good.num_accepted, tokens.shape[-1]) if drafted is None else drafted
        at = (lengths + row).clamp(min=0)
        law = target.gather(-2, at[..., None, None].expand(*at.shape, 1, target.shape[-1])).squeeze(-2)
        wrong = law.argmax(-1) if greedy else draw(law, randomness.next_token)
        bonus = (good.num_accepted == lengths) & (lengths > 0)
        return Verdict(good.num_accepted, torch.where(bonus, wrong, good.next_token))

    return rule


WRONG_BONUS = {"bonus token drawn greedily": _wrong_bonus(0, True), "bonus token of the row before": _wrong_bonus(-1, False)}


def plant_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have rounds keep what a wrong rule says, whether they decide by one call or by several."""
    rule = {**WRONG_RULES, **WRONG_BONUS}[name]

    def decide(
        calls: SamplingCalls,
        logits: Tensor,
        first: Sequence[int],
        vocab_size: int,
        law: tuple[float, int, float, float],
        drafts: Sequence[Sequence[int]],
        uniforms: Sequence[Sequence[float]],
        laws: Tensor | None,
        races: object = None,
    ) -> list[tuple[int, int]]:
        assert races is None
        del calls
        width = max(len(draft) for draft in drafts)
        places = [[min(at + n, logits.shape[1] - 1) for n in range(width + 1)] for at in first]
        own = torch.stack([row[at, :vocab_size] for row, at in zip(logits, places, strict=True)])
        temperature, top_k, top_p, min_p = law
        sampling = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        tokens, _ = pad_rows(drafts, own.device)
        points = [[*row[:-1], *[0.0] * (width + 1 - len(row)), row[-1]] for row in uniforms]
        numbers = torch.tensor(points, dtype=torch.float64)
        verdict = rule(
            standardize(own, sampling),
            None if laws is None else laws[:, :width],
            tokens,
            Uniforms(numbers[:, :-1], numbers[:, -1]),
            torch.tensor([len(draft) for draft in drafts]),
        )
        return list(zip(verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True))

    monkeypatch.setattr(several, "verify", rule)
    monkeypatch.setattr(SamplingCalls, "decide", decide)


def one_behind(proposal: Proposal) -> Proposal:
    """A planted bug: each token with the law of the position before, the first with that of the last."""
    assert proposal.probs is not None
    laws = proposal.probs.clone()
    for row, length in enumerate(proposal.lengths):
        laws[row, :length] = laws[row, :length].roll(1, dims=0)
    return replace(proposal, probs=laws)
