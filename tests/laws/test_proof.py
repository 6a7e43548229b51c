"""Each claim of docs/proof.md that `test_law` does not already check: what bends the law, what does not, and by how much.

Laws are enumerated exactly, with the rule as a black box (`tests.helpers.enumerate`); nothing here is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from outrider import theory
from outrider.acceptance.rules import verify_match
from outrider.acceptance.verify import Uniforms, Verdict, next_on_device, verify
from outrider.sampling import SamplingSettings, standardize
from outrider.sampling.draw import draw
from tests.helpers.enumerate import Law, Rule, _acceptances, _enumerate, _next_laws, round_joint, target_joint
from tests.helpers.toys import law_of, table

EXACT = 1e-12
SETTINGS = SamplingSettings(temperature=1.0)
V = 3
TARGET, DRAFT = law_of(table(1, V), SETTINGS), law_of(table(2, V), SETTINGS)
How = Callable[[Tensor], Tensor]
"""How many of the drafted tokens [D, K] are offered. → int64 [D]"""


def offering(how_many: How, point_mass: bool = False, base: Callable[..., Verdict] = verify) -> Rule:
    """The rule when only so many of the drafted tokens are offered."""

    def rule(target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms) -> Verdict:
        return base(target, None if point_mass else draft, tokens, randomness, how_many(tokens))

    return rule


def goes_on_after_zero(tokens: Tensor) -> Tensor:
    """Draws one more as long as the last one drawn was a 0; all that was drawn is offered."""
    return (tokens[:, :-1] == 0).long().cumprod(-1).sum(-1) + 1


def withholds_ones(tokens: Tensor) -> Tensor:
    """Offers the tokens before the first 1 that was drawn, and not that 1."""
    return (tokens != 1).long().cumprod(-1).sum(-1)


def distance(rule: Rule, target: Law, draft: Law, vocabulary: int, length: int) -> float:
    joint = round_joint(rule, target, draft, vocabulary, length)
    assert abs(float(joint.sum()) - 1.0) < EXACT
    return float((joint - target_joint(target, vocabulary, length + 1)).abs().sum()) / 2


@pytest.mark.parametrize("length", [2, 3])
def test_stopping_by_the_tokens_already_offered_keeps_the_law(length: int) -> None:
    assert distance(offering(goes_on_after_zero), TARGET, DRAFT, V, length) < EXACT


def test_withholding_a_drawn_token_bends_the_law() -> None:
    assert distance(offering(withholds_ones), TARGET, DRAFT, V, 2) > 0.01


def test_withholding_turns_a_fair_coin_into_three_quarters() -> None:
    """The example of the page: p = q = (½, ½), offered if it is a 0."""
    fair = torch.tensor([0.5, 0.5], dtype=torch.float64)
    joint = round_joint(offering(withholds_ones), lambda new: fair, lambda new: fair, 2, 1)
    assert joint.sum(-1).tolist() == pytest.approx([0.75, 0.25], abs=EXACT)


@pytest.mark.parametrize("how", [withholds_ones, goes_on_after_zero])
def test_a_point_mass_may_be_withheld(how: How) -> None:
    """Drawn by whatever law, but tested as certain: exact given the token, so it does not matter which are offered."""
    assert distance(offering(how, point_mass=True), TARGET, DRAFT, V, 2) < EXACT


def test_several_rounds_of_ragged_drafts_follow_the_target() -> None:
    """The induction: four tokens, round after round of 1 … 3 tokens each."""
    rule, length, total = offering(goes_on_after_zero), 2, 4
    target, draft = law_of(table(1, 2), SETTINGS), law_of(table(2, 2), SETTINGS)
    joint = torch.zeros([2] * total, dtype=torch.float64)
    reached: dict[tuple[int, ...], float] = {(): 1.0}  # the probability that a round begins after these tokens
    for done in range(total):
        for context in [text for text in reached if len(text) == done]:
            for block, share in blocks(rule, after(target, context), after(draft, context), length).items():
                text = (*context, *block)[:total]
                reached[text] = reached.get(text, 0.0) + reached[context] * share
    for text in itertools.product(range(2), repeat=total):
        joint[text] = reached[text]
    assert float((joint - target_joint(target, 2, total)).abs().max()) < EXACT


def after(law: Law, context: tuple[int, ...]) -> Law:
    return lambda new: law((*context, *new))


def blocks(rule: Rule, target: Law, draft: Law, length: int) -> dict[tuple[int, ...], float]:
    """The law of what one round yields, 1 … K + 1 tokens, by bisection on the rule's uniforms."""
    drafts = _enumerate(target, draft, 2, length)
    accept = _acceptances(rule, drafts)
    reached = torch.cat([torch.ones_like(drafts.mass).unsqueeze(-1), accept.cumprod(-1)], dim=-1)
    found: dict[tuple[int, ...], float] = {}
    for accepted, law in enumerate(_next_laws(rule, drafts, accept)):
        stopped = reached[:, accepted] * (1.0 - accept[:, accepted] if accepted < length else 1.0) * drafts.mass
        following = law * stopped.unsqueeze(-1)
        for (i, tokens), token in itertools.product(enumerate(drafts.tokens.tolist()), range(2)):
            block = (*tokens[:accepted], token)
            found[block] = found.get(block, 0.0) + float(following[i, token])
    return found


def random_laws(seed: int, count: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)


def first_token(rule: Rule, target: Tensor, draft: Tensor) -> Tensor:
    """The law of the first token of a round of one. → [V]"""
    return round_joint(rule, lambda new: target, lambda new: draft, len(target), 1).sum(-1)


@pytest.mark.parametrize("seed", range(2))
def test_accepted_tokens_follow_the_overlap_and_recovered_ones_the_rest(seed: int) -> None:
    """Given that it was accepted, a token follows min(p, q) / beta; so audits must not condition on it."""
    target, draft = random_laws(seed, 2, 4)
    drafts = _enumerate(lambda new: target, lambda new: draft, 4, 1)
    kept = drafts.mass * _acceptances(verify, drafts)[:, 0]
    beta = float(theory.acceptance_probability(target, draft))
    assert torch.allclose(kept / kept.sum(), torch.minimum(target, draft) / beta, atol=EXACT)
    assert not torch.allclose(kept / kept.sum(), target, atol=1e-3)
    recovered = target - torch.minimum(target, draft)
    assert torch.allclose(first_token(verify, target, draft) - kept, recovered, atol=EXACT)


@pytest.mark.parametrize("seed", range(6))
def test_no_rule_that_keeps_the_law_accepts_more(seed: int) -> None:
    """The best coupling of target and draft, by linear programming, agrees with probability beta."""
    target, draft = random_laws(10 + seed, 2, 5)
    agree = -torch.eye(5, dtype=torch.float64).flatten().numpy()
    sums = torch.zeros(10, 25, dtype=torch.float64)
    for x in range(5):
        sums[x].view(5, 5)[x] = 1.0  # P(output = x) = target
        sums[5 + x].view(5, 5)[:, x] = 1.0  # P(proposal = x) = draft
    best = linprog(agree, A_eq=sums.numpy(), b_eq=torch.cat([target, draft]).numpy(), method="highs")
    assert best.status == 0
    assert -best.fun == pytest.approx(float(theory.acceptance_probability(target, draft)), abs=1e-9)


def test_match_is_exact_given_the_token_that_was_drafted() -> None:
    """Hence sum target · draft, and no more: given a drafted token x, an output of law p is x with probability p(x)."""
    target, draft = random_laws(30, 2, 4)
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    kept = 0.0
    for token in range(4):
        tokens = torch.full((4000, 1), token)
        got = verify_match(target.expand(4000, 2, 4), None, tokens, Uniforms(grid.unsqueeze(-1), grid))
        first = torch.where(got.num_accepted == 1, tokens[:, 0], got.next_token)
        assert torch.allclose(torch.bincount(first, minlength=4) / 4000, target.float(), atol=1e-3)
        kept += float(draft[token] * got.num_accepted.double().mean())
    assert kept == pytest.approx(float(theory.match_acceptance_probability(target, draft)), abs=1e-3)


def lenient(lenience: float) -> Rule:
    """Leviathan A.5: the draft's probability times l before it is compared; the recovered token as ever."""

    def rule(target: Tensor, draft: Tensor | None, tokens: Tensor, randomness: Uniforms) -> Verdict:
        assert draft is not None
        index = tokens.unsqueeze(-1)
        p, q = target[..., :-1, :].gather(-1, index).squeeze(-1), draft.gather(-1, index).squeeze(-1)
        count = (randomness.accept * lenience * q < p).long().cumprod(-1).sum(-1)
        offered = torch.full_like(count, tokens.shape[-1])
        return Verdict(count, next_on_device(target, draft, tokens, count, offered, randomness.next_token))

    return rule


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
@pytest.mark.parametrize("seed", range(2))
def test_lenience_costs_exactly_what_it_gains(seed: int, lenience: float) -> None:
    """The distance from the target is alpha_l − alpha, and no token gets more than p / l."""
    target, draft = random_laws(20 + seed, 2, 4)
    law = first_token(lenient(lenience), target, draft)
    gained = theory.lenient_acceptance_probability(target, draft, lenience) - theory.acceptance_probability(target, draft)
    assert float((law - target).abs().sum() / 2) == pytest.approx(float(gained), abs=EXACT)
    assert bool((law <= target / lenience + EXACT).all())


@pytest.mark.parametrize(("target_sum", "draft_sum"), [(1.0, 1.0), (1.1, 0.9), (0.8, 1.2), (1.3, 1.3)])
def test_laws_that_do_not_sum_to_one_err_by_the_formula(target_sum: float, draft_sum: float) -> None:
    """TV = |T − D| / (T D) · ½ sum |min − m r|, at most m |T − D| / (T D), with m = sum min and r the residual law."""
    target, draft = random_laws(40, 2, 3)
    t, d = target * target_sum, draft * draft_sum

    def rule(given_target: Tensor, given_draft: Tensor | None, tokens: Tensor, randomness: Uniforms) -> Verdict:
        assert given_draft is not None
        return verify(given_target * target_sum, given_draft * draft_sum, tokens, randomness)

    both, missing = torch.minimum(t, d), (t - d).clamp(min=0)
    overlap, apart = float(both.sum()), abs(target_sum - draft_sum) / (target_sum * draft_sum)
    wanted = apart * float((both - overlap * missing / missing.sum()).abs().sum()) / 2
    found = float((first_token(rule, target, draft) - target).abs().sum()) / 2
    assert found == pytest.approx(wanted, abs=EXACT)
    assert found <= overlap * apart + EXACT


def test_a_target_below_the_draft_everywhere_is_still_followed() -> None:
    """Sums that differ may leave no residual; the token is then drawn from the target, and the law is exact."""
    target, draft = random_laws(41, 1, 4)[0], random_laws(41, 1, 4)[0]

    def rule(given_target: Tensor, given_draft: Tensor | None, tokens: Tensor, randomness: Uniforms) -> Verdict:
        assert given_draft is not None
        return verify(given_target * 0.6, given_draft, tokens, randomness)

    assert torch.allclose(first_token(rule, target, draft), target, atol=EXACT)


def test_a_draft_law_of_nan_is_rejected_and_harmless() -> None:
    target = random_laws(42, 1, 4)[0]

    def rule(given: Tensor, _: Tensor | None, tokens: Tensor, randomness: Uniforms) -> Verdict:
        nothing = torch.full_like(given[..., :-1, :], torch.nan)
        return verify(given, nothing, torch.zeros_like(tokens), randomness)

    assert torch.allclose(first_token(rule, target, target), target, atol=EXACT)


def test_sums_of_standardised_laws_are_near_one() -> None:
    """What the formula above makes of float32: a few 1e-5 at the most over 152,000 tokens without truncation."""
    logits = 3 * torch.randn(8, 152_000, generator=torch.Generator().manual_seed(0))
    sums = standardize(logits, SamplingSettings(temperature=0.7)).double().sum(-1)
    assert float((sums - 1).abs().max()) < 1e-4
    truncated = standardize(logits, SamplingSettings(temperature=0.7, top_p=0.95)).double().sum(-1)
    assert float((truncated - 1).abs().max()) < 1e-6


def test_draws_use_shares_of_the_sum() -> None:
    weights = torch.tensor([0.3, 0.9], dtype=torch.float64)
    assert draw(weights.expand(2, 2), torch.tensor([0.2499, 0.2501], dtype=torch.float64)).tolist() == [0, 1]
