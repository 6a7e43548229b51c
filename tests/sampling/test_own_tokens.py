"""A draft of few tokens is read, sampled and drawn from over these alone; what comes is what comes over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.costs import Costs
from outrider.costs.pass_timer import PassTimer
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength
from outrider.draft_steps.own_tokens import OwnTokens
from outrider.drafters import HeadDrafter, ModelDrafter
from outrider.models.base import Sequence, WhichLogits, has_few_tokens
from outrider.models.cut_head import DRAFT_TOKENS, cut_head
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.heads import write_head
from tests.helpers.marks import thinned
from tests.helpers.tiny_models import VOCABULARY, module, tiny

FEW = [2, 3, *range(7, 31), 40]
LAWS = {
    "greedy": SamplingSettings(),
    "warm": SamplingSettings(temperature=1.3),
    "top-k": SamplingSettings(temperature=1.0, top_k=5),
    "top-p": SamplingSettings(temperature=0.8, top_p=0.8),
}


def student() -> TransformersModel:
    made = module("Llama", 2)
    setattr(made.config, DRAFT_TOKENS, FEW)
    cut_head(made, torch.tensor(FEW), "student")
    return TransformersModel(made, name="student")


def shortened() -> TransformersModel:
    """The first rows of its head are left."""
    made = module("Llama", 2)
    cut_head(made, len(FEW), "shortened")
    return TransformersModel(made, name="shortened")


def head(folder: Path) -> HeadDrafter:
    return HeadDrafter(write_head(folder, "autoregressive", tokens=FEW), step_seconds=0.05)


DRAFTS: dict[str, Callable[[Path], ModelDrafter]] = {
    "head": head,
    "blocks": lambda folder: HeadDrafter(write_head(folder, "blockwise", tokens=FEW), step_seconds=0.05),
    "student": lambda folder: ModelDrafter(student(), step_seconds=0.05),
    "shortened": lambda folder: ModelDrafter(shortened(), step_seconds=0.05),
}


@pytest.mark.parametrize(("name", "law", "adaptive"), thinned(DRAFTS, LAWS, [False, True]))
def test_work_over_few_tokens_gives_what_work_over_all_does(name: str, law: str, adaptive: bool, tmp_path: Path) -> None:
    """A bias of nothing asks for all tokens of the target."""
    target, length = tiny("Llama", 1), AdaptiveLength(Costs({1: 1.0, 9: 1.1})) if adaptive else FixedLength(3)
    drafter = DRAFTS[name](tmp_path)
    drafter.bind(target)

    def rounds(settings: SamplingSettings, policy: DraftLength) -> tuple[list[list[int]], list[tuple[object, ...]]]:
        own = OwnTokens.of(drafter.model, target.vocab_size, settings)
        assert (own.ids is None) is bool(settings.logit_bias)
        requests = [Request((2, 9, 5 + i), 24, RandomStream(5, i)) for i in range(3)]
        tokens, made = decode(target, requests, settings, drafter, policy)
        return tokens, [(one.tokens, one.drafted, one.accepted, one.alternatives) for row in made for one in row]

    few, every = rounds(LAWS[law], length), rounds(replace(LAWS[law], logit_bias={0: 0.0}), length)
    assert few == every
    assert any(drafted for _, drafted, *_ in few[1])


def test_laws_stand_at_their_tokens() -> None:
    model = student()
    assert has_few_tokens(model)
    own = OwnTokens.of(model, VOCABULARY, SamplingSettings())
    laws = torch.rand(2, 3, len(FEW), dtype=torch.float64)
    spread = own.laws(laws)
    assert torch.equal(spread[..., FEW], laws)
    assert float(spread.sum()) == pytest.approx(float(laws.sum()))
    assert own.tokens(torch.tensor([0, 2, len(FEW) - 1])).tolist() == [2, 7, 40]
    sequences = [model.open(), model.open()]
    given = torch.tensor([[3, 8, 9], [4, 0, 0]]), [3, 1]
    every = model.score(sequences, *given, "last")
    for sequence in sequences:
        sequence.truncate(0)
    assert every is not None
    few = own.score(sequences, *given)
    assert torch.equal(few, every[:, 0, FEW])
    rest = [token for token in range(VOCABULARY) if token not in FEW]
    assert (every[:, 0, rest] == -math.inf).all()


def test_a_target_without_some_of_the_drafts_tokens_sees_all_of_its_own() -> None:
    """Its vocabulary ends before the draft's: columns and tokens are the same, cut at the target's end."""
    own = OwnTokens.of(student(), 35, SamplingSettings())
    assert own.ids is None
    logits = own.score([own.model.open()], torch.tensor([[3]]), [1])
    assert logits.shape == (1, 35)
    narrow = torch.rand(1, 20)
    assert torch.equal(own.laws(narrow), torch.nn.functional.pad(narrow, (0, 15)))


def test_a_drafts_cost_is_that_of_passes_as_they_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = student(), []
    scored = model.score_few

    def spy(sequences: list[Sequence], tokens: torch.Tensor, lengths: list[int], logits: WhichLogits) -> torch.Tensor | None:
        asked.append((tokens.shape[1], logits))
        return scored(sequences, tokens, lengths, logits)

    monkeypatch.setattr(model, "score_few", spy)
    monkeypatch.setattr(model, "score", None)
    with PassTimer(model, (1, 3), context=4) as timer:
        timer.time(1)
        timer.time(3)
    assert asked == [(1, "last"), (3, "all")]
