"""The losses that drafts are trained by: what they are called, where they count, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outrider.heads.config import HeadConfig, Kind
from outrider.heads.layers import make_network
from outrider.models.transformers_model import TransformersModel
from outrider.train import fused
from outrider.train.fused import Rows, TargetLaws, summed
from outrider.train.losses import Loss
from outrider.train.states import states_of
from outrider.train.trainee import HeadTrainee
from outrider.train.unroll import blocks, chains
from tests.helpers.tiny_models import VOCABULARY, module

LOSSES_BY_NAME: tuple[Loss, ...] = ("tv", "kl", "mix")
TEXT = [5, 6, 7, 8, 9, 20, 21, 3, 44, 17, 30, 2, 58, 12, 33, 5]


def divergence(target_probs: torch.Tensor, draft_logits: torch.Tensor, loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and alpha of each row, as the formulas say. [.., T] twice → [..] twice"""
    log_draft = draft_logits.log_softmax(-1)
    cross_entropy = -(target_probs * log_draft).sum(-1)
    alpha = torch.minimum(target_probs, log_draft.exp()).sum(-1)
    return {"kl": cross_entropy, "tv": 1.0 - alpha, "mix": cross_entropy + (1.0 - alpha)}[loss], alpha


def test_losses_are_what_they_are_called() -> None:
    target = torch.tensor([[0.5, 0.3, 0.1]])  # a tenth lies outside the vocabulary
    rows, one = Rows(torch.eye(3), None), torch.ones(1, 1)
    laws = TargetLaws(target.log(), torch.zeros(1), rows)
    drafted = torch.tensor([[[0.6, 0.2, 0.2]]]).log()
    tv, kl, mix = (summed(drafted, rows, laws, one, loss) for loss in LOSSES_BY_NAME)
    assert float(tv.alpha) == pytest.approx(0.5 + 0.2 + 0.1)
    assert float(tv.loss) == pytest.approx(0.2)
    assert float(kl.loss) == pytest.approx(-(0.5 * np.log(0.6) + 0.3 * np.log(0.2) + 0.1 * np.log(0.2)))
    assert float(mix.loss) == pytest.approx(float(tv.loss + kl.loss))
    best = (target / target.sum()).log().unsqueeze(0).requires_grad_()
    (gradient,) = torch.autograd.grad(summed(best, rows, laws, one, "kl").loss, best)
    assert gradient.abs().max() < 1e-7


@pytest.mark.parametrize("kind", ["autoregressive", "blockwise"])
@torch.no_grad()
def test_every_depth_counts_where_it_has_a_law_to_meet(kind: Kind) -> None:
    """The loss of a head from the chains and blocks themselves: depth s is a mean over its positions, weighted by 0.8^s."""
    torch.manual_seed(0)
    target = TransformersModel(module("Llama", 0, torch.float32))
    config = HeadConfig(kind, "tiny", 32, VOCABULARY, VOCABULARY, 24, 4, 2, 8, blocks=3)
    network: Any = make_network(config)
    trainee = HeadTrainee(network, target, torch.arange(VOCABULARY), "mix", depth=3)
    tokens = torch.tensor([TEXT, TEXT[::-1]])
    target.keep_states()
    shards = [states_of(target, row.unsqueeze(0)) for row in tokens]
    states, normalisers = (torch.cat([getattr(shard, name) for shard in shards]) for name in ("states", "normalisers"))
    embedded = target.module.get_input_embeddings()(tokens)
    probs = (target.module.lm_head(states) - normalisers.unsqueeze(-1)).exp()
    total, everywhere = 0.0, torch.ones_like(tokens, dtype=torch.bool)
    for s, predicted in enumerate((chains if kind == "autoregressive" else blocks)(network, embedded, states, 3)):
        length = tokens.shape[1]
        ours = predicted[:, s:] if kind == "autoregressive" else predicted[:, : length - s]
        losses, alphas = divergence(probs[:, s:], target.module.lm_head(ours), "mix")
        total += 0.8**s * float(losses.mean())
        found = trainee(tokens, states, normalisers, everywhere)["counts"][s]
        assert float(found["alpha"]) == pytest.approx(float(alphas.sum()), rel=1e-4)
        assert int(found["positions"]) == losses.numel()
    assert float(trainee(tokens, states, normalisers, everywhere)["loss"]) == pytest.approx(
        total / (1 + 0.8 + 0.64), rel=1e-4
    )


@pytest.mark.parametrize("loss", ["kl", "tv", "mix"])
@pytest.mark.parametrize("offset", [True, False])
def test_losses_summed_part_by_part_are_the_formulas(loss: Loss, offset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value, alpha, match and gradient, for rows in parts of several sizes; some do not count."""
    torch.manual_seed(0)
    rows, states = torch.randn(9, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    shift = torch.randn(9, dtype=torch.float64) if offset else None
    whole = torch.nn.functional.linear(states, rows, shift)
    laws = TargetLaws(states, whole.logsumexp(-1) + 0.2, Rows(rows, shift))  # a fifth lies outside
    head = Rows(rows + 0.1 * torch.randn_like(rows), shift)  # of the draft: another one than the target's
    predicted = (states + 0.4 * torch.randn(2, 7, 5, dtype=torch.float64)).requires_grad_()
    weights = torch.rand(2, 7, dtype=torch.float64)
    weights[1, 0] = 0.0
    probs, logits = laws.probs(slice(None)), head.logits(predicted)
    losses, alphas = divergence(probs, logits, loss)
    best, sure = probs.max(-1), probs.amax(-1) >= 1 - probs.sum(-1)
    same = (logits.argmax(-1) == best.indices) & sure & (weights > 0)
    (wanted,) = torch.autograd.grad((losses * weights).sum(), predicted)
    for size in (1, 2 * 9, 1000):
        monkeypatch.setattr(fused, "AT_ONCE", size)
        found = summed(predicted, head, laws, weights, loss)
        (gradient,) = torch.autograd.grad(found.loss, predicted)
        torch.testing.assert_close(found.loss, (losses * weights).sum())
        torch.testing.assert_close(found.alpha, (alphas * (weights > 0)).sum(-1))
        assert found.match.tolist() == same.sum(-1).tolist()
        torch.testing.assert_close(gradient, wanted)
    assert 0 < int(same.sum()) < same.numel()
