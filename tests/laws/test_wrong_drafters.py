"""The tests of the law would see it if a drafter of any kind were wrong: one planted fault each.

Faults of drafts that are models, speculative or heads are in test_end_to_end_law, test_drafter_laws and test_heads; those of
drafts with another tokenizer in test_other_tokenizer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.draft_length import FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    EarlyExitDrafter,
    ModelDrafter,
    NgramDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SelfDrafter,
    SuffixDrafter,
)
from outrider.proposal import Proposal
from outrider.sampling import SamplingSettings
from tests.helpers.heads import exact_joint, sample, small_target
from tests.helpers.ngrams import corpus, trained
from tests.helpers.samples import ALARM, FAULTY, SAMPLES, V, p_value, p_value_of, run
from tests.helpers.toys import SETTINGS, one_behind, table

WARM = SETTINGS["temperature 1"]


def uniform(proposal: Proposal) -> torch.Tensor:
    return torch.full((*proposal.tokens.shape, V), 1 / V, dtype=torch.float64)


class NgramOneBehind(NgramDrafter):
    """Each token with the law of the position before."""

    def propose(self, *args: Any) -> Proposal:
        return one_behind(super().propose(*args))


class LookupWithALaw(PromptLookupDrafter):
    """Claims to have drawn what it copied."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        return replace(proposal, probs=uniform(proposal))


class SuffixWithALaw(SuffixDrafter):
    """The same."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        return replace(proposal, probs=uniform(proposal))


class RandomWithAFavourite(RandomDrafter):
    """Claims that token 0 was likelier than it was."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        favoured = uniform(proposal)
        favoured[..., 0] *= 3
        return replace(proposal, probs=favoured / favoured.sum(-1, keepdim=True))


class ChoosesAfterTheDraw(ChoiceDrafter):
    """Takes back a draft that begins with token 0, which it has seen: whether it drafts depends on what it drew."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        firsts = proposal.tokens[:, 0].tolist()
        return replace(proposal, lengths=[n * (first != 0) for n, first in zip(proposal.lengths, firsts, strict=True)])


class SelfAtAnotherTemperature(SelfDrafter):
    """Draws at temperature .5 and claims the target's own law."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        assert proposal.probs is not None
        flatter = proposal.probs.sqrt()
        return replace(proposal, probs=flatter / flatter.sum(-1, keepdim=True))


class EarlyExitFlattened(EarlyExitDrafter):
    """Claims a flatter law than it drew from."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        assert proposal.probs is not None
        return replace(proposal, probs=0.5 * proposal.probs + 0.5 / V)


@pytest.mark.parametrize("kind", [NgramDrafter, NgramOneBehind])
def test_an_ngram_draft_with_the_laws_of_other_positions_is_rejected(kind: type[NgramDrafter], tmp_path: Path) -> None:
    target = table(1, V)
    drafter = kind(trained(tmp_path / "t", corpus(size=V), size=V, order=3, min_count=1))
    samples = SAMPLES if kind is NgramDrafter else FAULTY
    tokens, _ = run(target, drafter, WARM, FixedLength(3), samples=samples)
    assert (p_value(tokens, target, WARM) < ALARM) == (kind is NgramOneBehind)


@pytest.mark.parametrize(
    "drafter",
    [
        LookupWithALaw(),
        SuffixWithALaw(),
        RandomWithAFavourite(),
        ChoosesAfterTheDraw([ModelDrafter(table(2, V), step_seconds=0.3), RandomDrafter()]),
        SelfAtAnotherTemperature(temperature=0.5),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_a_wrong_drafter_is_rejected(drafter: Any) -> None:
    target = table(1, V)
    tokens, rounds = run(target, drafter, WARM, FixedLength(3), samples=FAULTY)
    assert any(record.drafted for record in rounds)
    assert p_value(tokens, target, WARM) < ALARM


@pytest.mark.parametrize("setting", ["greedy", "temperature 1", "all"])
def test_early_exit_follows_the_targets_law(setting: str) -> None:
    target, settings = small_target(), SETTINGS[setting]
    written, rounds = sample(target, EarlyExitDrafter(1), settings, FixedLength(3))
    assert p_value_of(written, exact_joint(target, settings)) > ALARM
    assert sum(record.drafted for record in rounds) > len(written)


@pytest.mark.parametrize("settings", [SamplingSettings(temperature=1.0)])
def test_early_exit_with_another_law_is_rejected(settings: SamplingSettings) -> None:
    target = small_target()
    written, _ = sample(target, EarlyExitFlattened(1), settings, FixedLength(3))
    assert p_value_of(written, exact_joint(target, settings)) < ALARM
