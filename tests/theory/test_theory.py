"""Closed forms: the design's check values, the papers' identities, the ranges."""

from __future__ import annotations

import math

import pytest
import torch

from outrider import theory
from outrider.acceptance.rules import verify_match, verify_rejection
from outrider.acceptance.verify import Uniforms
from outrider.errors import ParameterError
from tests.helpers.enumerate import round_joint

# Leviathan Table 1: alpha, gamma, operations, speed (c = c_hat = 0).
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1_of_leviathan(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert theory.operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.005)
    assert theory.walltime_factor(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 0.999999999])
@pytest.mark.parametrize("gamma", [0, 1, 4, 16])
def test_expected_tokens_is_equation_1(alpha: float, gamma: int) -> None:
    assert theory.expected_tokens(alpha, gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-6)


def test_a_perfect_draft_gives_gamma_plus_one_tokens() -> None:
    assert theory.expected_tokens(1.0, 7) == 8


def test_improvement_exists_exactly_when_alpha_exceeds_c() -> None:
    assert theory.best_gamma(0.3, 0.31) == 0
    assert theory.best_gamma(0.3, 0.3) == 0
    assert theory.best_gamma(0.3, 0.29) >= 1
    assert theory.walltime_factor(0.3, 1, 0.2) == pytest.approx(theory.minimal_walltime_factor(0.3, 0.2))


@pytest.mark.parametrize(("alpha", "c"), [(0.5, 0.01), (0.8, 0.05), (0.9, 0.02), (0.95, 0.1)])
def test_best_gamma_beats_its_neighbours(alpha: float, c: float) -> None:
    best = theory.best_gamma(alpha, c)
    top = theory.walltime_factor(alpha, best, c)
    assert top >= max(theory.walltime_factor(alpha, g, c) for g in range(40))


def test_the_oracle_is_a_bound_of_up_to_sixty_percent() -> None:
    """Leviathan 3.5: up to 60 % above the best fixed gamma for typical alpha and c."""
    gains = [
        theory.oracle_walltime_factor(a, c) / theory.walltime_factor(a, theory.best_gamma(a, c), c)
        for a in (0.5, 0.6, 0.7, 0.8, 0.9)
        for c in (0.01, 0.02, 0.05, 0.1)
    ]
    assert min(gains) > 1.0
    assert 1.3 < max(gains) < 1.7


def test_measured_costs_reduce_to_theorem_3_8_when_verification_is_flat() -> None:
    flat = dict.fromkeys(range(1, 10), 2.0)
    assert theory.measured_speedup(0.8, 4, 0.2, flat) == pytest.approx(theory.walltime_factor(0.8, 4, 0.1))


def test_measured_costs_can_say_that_speculation_does_not_pay() -> None:
    linear = {n: float(n) for n in range(1, 10)}
    assert all(theory.measured_speedup(0.8, gamma, 0.1, linear) < 1.0 for gamma in range(1, 9))


def test_d_lk_is_one_minus_beta() -> None:
    rows = torch.rand(2, 20, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    target, draft = rows
    beta = theory.acceptance_probability(target, draft)
    assert torch.allclose(theory.d_lk(target, draft), 1 - beta)
    assert bool((theory.match_acceptance_probability(target, draft) <= beta).all())
    assert bool((theory.rejection_acceptance_probability(target, draft) <= beta + 1e-12).all())
    assert torch.allclose(theory.lenient_acceptance_probability(target, draft, 1.0), beta)
    assert bool((theory.lenient_acceptance_probability(target, draft, 0.5) >= beta).all())


TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
DRAFT = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def test_other_rules_accept_as_often_as_their_formulas_say() -> None:
    """Over a fine grid of uniforms, drafts weighted by their law; the grid's error is below 1e-3."""
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    for rule, wanted in (
        (verify_match, theory.match_acceptance_probability(TARGET, DRAFT)),
        (verify_rejection, theory.rejection_acceptance_probability(TARGET, DRAFT)),
    ):
        rate = 0.0
        for token in range(3):
            shape = (len(grid), 2, 3)
            tokens = torch.full((len(grid), 1), token)
            uniforms = Uniforms(grid.unsqueeze(-1), grid)
            got = rule(TARGET.expand(shape), DRAFT.expand(len(grid), 1, 3), tokens, uniforms)
            rate += float(DRAFT[token]) * float(got.num_accepted.double().mean())
        assert rate == pytest.approx(float(wanted), abs=1e-3)


def test_match_is_exact_at_its_first_position() -> None:
    """Its decisions are intervals, not thresholds, so it is enumerated on a grid that holds all breakpoints."""
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    law = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        tokens = torch.full((len(grid), 1), token)
        got = verify_match(TARGET.expand(1000, 2, 3), None, tokens, Uniforms(grid.unsqueeze(-1), grid))
        first = torch.where(got.num_accepted == 1, tokens[:, 0], got.next_token)
        law += DRAFT[token] * torch.bincount(first, minlength=3) / 1000
    assert law.tolist() == pytest.approx(TARGET.tolist(), abs=1e-12)


def test_plain_rejection_never_accepts_what_a_narrower_draft_cannot_cover() -> None:
    narrow = torch.tensor([0.0, 0.4, 0.6], dtype=torch.float64)
    assert float(theory.rejection_acceptance_probability(TARGET, narrow)) == 0.0
    law = round_joint(verify_rejection, lambda new: TARGET, lambda new: narrow, 3, 1)
    assert torch.allclose(law.sum(-1), TARGET)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.expected_tokens(1.1, 2), "alpha"),
        (lambda: theory.expected_tokens(math.nan, 2), "alpha"),
        (lambda: theory.expected_tokens(0.5, -1), "gamma"),
        (lambda: theory.walltime_factor(0.5, 2, -0.1), "c"),
        (lambda: theory.operations_factor(0.5, 2, math.inf), "c_hat"),
        (lambda: theory.minimal_walltime_factor(0.2, 0.3), "alpha"),
        (lambda: theory.measured_speedup(0.5, 2, 0.1, {1: 1.0}), "verify_seconds"),
        (lambda: theory.measured_speedup(0.5, 2, -0.1, {1: 1.0, 3: 1.0}), "draft_seconds"),
        (lambda: theory.lenient_acceptance_probability(TARGET, DRAFT, 0.0), "lenience"),
    ],
)
def test_ranges_are_checked(call: object, name: str) -> None:
    assert callable(call)
    with pytest.raises(ParameterError, match=name):
        call()
