"""End to end, with the real random numbers: chi-square of whole continuations against the target's exact law.

False-alarm rate: each test rejects at p < 1e-6, and there are fewer than 40 of them, so one correct run in 25,000 fails.
The seeds are fixed, so a pass stays a pass. The planted bugs must be rejected at the same level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, FixedLength, Plan
from outrider.drafters import ModelDrafter, PromptLookupDrafter
from outrider.drafters.base import DraftContext
from outrider.kernels.calls import SamplingCalls
from outrider.kernels.sampling import sampling_kernels
from outrider.models.table import TableModel
from outrider.proposal import DraftRow, Proposal
from outrider.randomness import RandomStream
from outrider.records import acceptance_by_position
from outrider.round import Extras
from outrider.sampling import SamplingSettings, standardize
from tests.helpers import toys
from tests.helpers.marks import thinned
from tests.helpers.samples import (
    ALARM,
    FAULTY,
    LENGTH,
    SAMPLES,
    RollbackOffByOne,
    StaleAfterRollback,
    V,
    p_value,
    run,
)
from tests.helpers.toys import PROMPT, SETTINGS, WRONG_RULES, plant_rule


def table(seed: int, vocabulary: int, order: int = 2, sharpness: float = 2.0) -> TableModel:
    """In float32, as real logits are, so that our kernels draft and decide; test_drafter_laws.py has float64."""
    return toys.table(seed, vocabulary, order, sharpness, torch.float32)


@pytest.mark.parametrize("name", thinned(SETTINGS))
def test_model_drafts_follow_the_targets_law(name: str) -> None:
    target = table(1, V)
    tokens, _ = run(target, ModelDrafter(table(2, V)), SETTINGS[name], FixedLength(3))
    assert p_value(tokens, target, SETTINGS[name]) > ALARM


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_every_draft_length_follows_the_targets_law(length: int) -> None:
    target, settings = table(1, V), SETTINGS["temperature 1"]
    tokens, _ = run(target, ModelDrafter(table(2, V)), settings, FixedLength(length))
    assert p_value(tokens, target, settings) > ALARM


def test_adaptive_lengths_follow_the_targets_law() -> None:
    target, settings = table(1, V), SETTINGS["temperature 1"]
    costs = Costs({1: 1.0, 2: 1.1, 5: 1.4})
    tokens, rounds = run(target, ModelDrafter(table(2, V), step_seconds=0.3), settings, AdaptiveLength(costs, longest=4))
    assert len({record.drafted for record in rounds}) > 1
    assert p_value(tokens, target, settings) > ALARM


@pytest.mark.parametrize("name", ["greedy", "temperature 1", "top-p", "penalties"])
def test_prompt_lookup_follows_the_targets_law(name: str) -> None:
    target = table(1, V)
    tokens, rounds = run(target, PromptLookupDrafter(), SETTINGS[name], FixedLength(3))
    assert sum(record.drafted for record in rounds) > 0
    assert p_value(tokens, target, SETTINGS[name]) > ALARM


def test_rows_that_end_early_do_not_disturb_the_others() -> None:
    """Token 2 ends a row; what the others write must not change in law."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    ends = frozenset({2})
    requests = [Request(PROMPT, LENGTH, RandomStream(5, i), ends if i % 2 else frozenset()) for i in range(SAMPLES)]
    tokens, _ = decode(target, requests, settings, ModelDrafter(table(2, V)), FixedLength(3))
    assert p_value(tokens[::2], target, settings) > ALARM
    ended = [row for row in tokens[1::2] if 2 in row]
    assert ended
    assert all(row.index(2) == len(row) - 1 for row in ended)


def test_rounds_here_decide_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our kernels are: so the tests of this file are tests of these, too."""
    calls: list[int] = []
    decide = SamplingCalls.decide

    def counted(*given: Any) -> list[tuple[int, int]]:
        calls.append(1)
        return decide(*given)

    monkeypatch.setattr(SamplingCalls, "decide", counted)
    _, rounds = run(table(1, V), ModelDrafter(table(2, V)), SETTINGS["top-p"], FixedLength(3), 20)
    assert rounds
    assert bool(calls) == (sampling_kernels() is not None)


@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_are_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_rule(monkeypatch, name)
    target, settings = table(1, V), SETTINGS["temperature 1"]
    tokens, _ = run(target, ModelDrafter(table(2, V)), settings, FixedLength(3), samples=FAULTY)
    assert p_value(tokens, target, settings) < ALARM


class ArgmaxScoredWithSoftmax(ModelDrafter):
    """Proposes its most likely token, but claims to have sampled it."""

    def propose(
        self,
        rows: Sequence[DraftRow],
        plans: Sequence[Plan],
        context: DraftContext,
    ) -> Proposal:
        greedy = DraftContext(SamplingSettings(), context.target, context.vocab_size, context.clock)
        proposal = super().propose(rows, plans, greedy)
        return Proposal(proposal.tokens, proposal.lengths, claimed_laws(self, rows, proposal, context))


class DraftsBeforeProcessors(ModelDrafter):
    """Draws with the full settings, but is scored with the bare softmax."""

    def propose(
        self,
        rows: Sequence[DraftRow],
        plans: Sequence[Plan],
        context: DraftContext,
    ) -> Proposal:
        proposal = super().propose(rows, plans, context)
        bare = DraftContext(SamplingSettings(temperature=1.0), context.target, context.vocab_size, context.clock)
        return Proposal(proposal.tokens, proposal.lengths, claimed_laws(self, rows, proposal, bare))


class OneNumberForAll(ModelDrafter):
    """Draws every token of a draft with the same number."""

    def propose(
        self,
        rows: Sequence[DraftRow],
        plans: Sequence[Plan],
        context: DraftContext,
    ) -> Proposal:
        for row in rows:
            row.stream = SameNumber(row.stream)
        return super().propose(rows, plans, context)


class SameNumber(RandomStream):
    """Gives its first number again and again, until the round is over."""

    def __init__(self, stream: RandomStream) -> None:
        self._number = stream.take(1)[0]

    def take(self, count: int) -> list[float]:
        return [self._number] * count


def claimed_laws(drafter: ModelDrafter, rows: Sequence[DraftRow], proposal: Proposal, context: DraftContext) -> Tensor:
    model = drafter.model
    assert isinstance(model, TableModel)
    width = proposal.tokens.shape[1]
    laws = [
        [model.probs_after([*row.tokens, *drafted[:j]]).log() for j in range(width)]
        for row, drafted in zip(rows, proposal.tokens.tolist(), strict=True)
    ]
    return standardize(torch.stack([torch.stack(row) for row in laws]), context.sampling)


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (ArgmaxScoredWithSoftmax, "temperature 1"),
        (DraftsBeforeProcessors, "temperature 0.6"),
        (OneNumberForAll, "temperature 1"),
    ],
)
def test_wrong_drafters_are_rejected(drafter: type[ModelDrafter], name: str) -> None:
    target = table(1, V)
    tokens, _ = run(target, drafter(table(2, V)), SETTINGS[name], FixedLength(3))
    assert p_value(tokens, target, SETTINGS[name]) < ALARM


def wrong_rollback(seed: int) -> RollbackOffByOne:
    good = table(seed, V)
    return RollbackOffByOne(good._probs)


def test_a_target_that_rolls_back_off_by_one_is_rejected() -> None:
    settings = SETTINGS["temperature 1"]
    tokens, _ = run(wrong_rollback(1), ModelDrafter(table(2, V)), settings, FixedLength(1), samples=FAULTY)
    assert p_value(tokens, table(1, V), settings) < ALARM


@pytest.mark.slow
def test_a_draft_with_stale_keys_keeps_the_law_but_loses_acceptance() -> None:
    """The output stays right; only alpha tells. So alpha is asserted, against the same run with a sound draft."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    near = 0.6 * target._probs + 0.4 / V
    tokens, wrong = run(target, ModelDrafter(StaleAfterRollback(near)), settings, FixedLength(3), new_tokens=12)
    _, right = run(target, ModelDrafter(TableModel(near)), settings, FixedLength(3), new_tokens=12)
    assert p_value([row[:LENGTH] for row in tokens], target, settings) > ALARM
    rates = [sum(r.accepted for r in rounds) / sum(r.tested for r in rounds) for rounds in (right, wrong)]
    assert rates[0] > 0.8
    assert rates[1] < rates[0] - 0.008  # four standard deviations of the difference; the seed is fixed


def test_acceptance_at_each_position_is_sum_min() -> None:
    """accepted / tested at each position agrees with the mean of sum min(target, draft) over the contexts tested.

    Given the context, each test is a coin with that probability, so the difference has a known variance; six standard
    deviations, three positions: a correct run fails with odds of 6e-9.
    """
    target, settings = table(1, V), SETTINGS["temperature 1"]
    requests = [Request(PROMPT, 20, RandomStream(9, i)) for i in range(800)]
    extras = Extras(betas=True)
    _, rounds = decode(target, requests, settings, ModelDrafter(table(2, V)), FixedLength(3), extras)
    records = [record for row in rounds for record in row]
    for position, (tested, accepted) in enumerate(acceptance_by_position(records)):
        betas = [r.betas[position] for r in records if r.betas is not None and r.tested > position]
        assert len(betas) == tested > 1000
        spread = sum(b * (1 - b) for b in betas) ** 0.5
        assert abs(accepted - sum(betas)) < 6 * spread
        assert 0.1 < accepted / tested < 0.95
