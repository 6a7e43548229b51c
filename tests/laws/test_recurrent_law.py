"""Drawn end to end by models that keep a state, with drafts that keep one: the joint law of four tokens is the target's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.draft_length import FixedLength
from outrider.drafters import ModelDrafter
from outrider.models.cache.runs import Mark
from outrider.models.recurrent.model import RecurrentModel
from outrider.sampling import Context, SamplingSettings, standardize
from tests.helpers.enumerate import target_joint
from tests.helpers.marks import slow
from tests.helpers.ragged import last_state, reference
from tests.helpers.samples import ALARM, LENGTH, V, p_value_of, run
from tests.helpers.tiny_models import module
from tests.helpers.toys import PROMPT

SAMPLES = 2000
SETTINGS = SamplingSettings(temperature=0.9)


def small(architecture: str, seed: int) -> RecurrentModel:
    """Of three tokens, in float32."""
    no_others = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return RecurrentModel(module(architecture, seed, torch.float32, vocab_size=V, **no_others))


def joint_of(model: RecurrentModel) -> Tensor:
    def law(new: tuple[int, ...]) -> Tensor:
        tokens = [*PROMPT, *new]
        return standardize(reference(model, tokens)[-1:], SETTINGS, [Context(torch.tensor(tokens), len(PROMPT))])[0]

    return target_joint(law, V, LENGTH)


@pytest.mark.parametrize(("target", "draft"), [("Lfm2", "Mamba2"), slow("Qwen3_5", "Lfm2"), slow("Jamba", "Qwen3_5")])
def test_the_law_is_the_targets(target: str, draft: str) -> None:
    model = small(target, 0)
    tokens, rounds = run(model, ModelDrafter(small(draft, 1)), SETTINGS, FixedLength(3), samples=SAMPLES)  # type: ignore[arg-type]
    assert 0.1 < sum(record.accepted for record in rounds) / sum(record.drafted for record in rounds) < 0.9
    assert p_value_of(tokens, joint_of(model)) > ALARM


@pytest.mark.parametrize("target", [slow("Lfm2"), "Qwen3_5"])
def test_states_that_are_not_rolled_back_are_seen(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = small(target, 0), small("Mamba2", 1)
    joint = joint_of(model)

    monkeypatch.setattr(Mark, "of", last_state)
    tokens, _ = run(model, ModelDrafter(draft), SETTINGS, FixedLength(3), samples=SAMPLES)  # type: ignore[arg-type]
    assert p_value_of(tokens, joint) < ALARM
