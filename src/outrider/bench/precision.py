"""What quantizing does to the model itself: losslessness is relative to the model that is run.

Teacher-forced on one text: perplexity, how often the most likely token is the reference's, and the divergence of the laws.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.bench.tasks import human_eval_solutions
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel
from outrider.support.device_data import pad_rows

CHUNK = 64  # tokens whose laws are held at once


@dataclass(frozen=True)
class Precision:
    """Of one model beside the reference, over `tokens` positions of a text.

    perplexity: exp of the mean negative log-probability of the text. agreement: share of positions at which the most likely
    token is the reference's. divergence: mean KL(reference ‖ model), nats. overlap: mean Σ min(reference, model), which is
    the acceptance rate α that the one would have as a draft of the other.
    """

    name: str
    tokens: int
    perplexity: float
    agreement: float
    divergence: float
    overlap: float


def default_text() -> str:
    """Problems of HumanEval with their solutions."""
    return "\n\n".join(human_eval_solutions(0, 9))


def laws(model: LanguageModel, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Log-probabilities after each token but the last, in chunks. float32 [≤ CHUNK, V]"""
    sequence = model.open(reserve=len(tokens))
    try:
        for at in range(0, len(tokens) - 1, CHUNK):
            part = tokens[at : min(at + CHUNK, len(tokens) - 1)]
            logits = model.score([sequence], *pad_rows([part], model.device), "all")
            assert logits is not None
            yield logits[0].float().log_softmax(-1)
    finally:
        sequence.close()


def compare_laws(name: str, reference: LanguageModel, model: LanguageModel, tokens: Sequence[int]) -> Precision:
    """Score the text with both, side by side, so that no more than a chunk of laws is held."""
    if len(tokens) < 2:
        raise ParameterError("text must have two tokens or more")
    size = min(reference.vocab_size, model.vocab_size)
    following = torch.tensor(tokens[1:])
    sums = torch.zeros(4, dtype=torch.float64)
    at = 0
    for theirs, ours in zip(laws(reference, tokens), laws(model, tokens), strict=True):
        p, q = (x[:, :size].cpu().double() for x in (theirs, ours))
        after = following[at : at + len(q)]
        sums += torch.stack(
            (
                -q.gather(1, after.unsqueeze(1)).sum(),
                (p.argmax(-1) == q.argmax(-1)).sum().double(),
                (p.exp() * (p - q)).nan_to_num(0.0).sum(),
                torch.minimum(p.exp(), q.exp()).sum(),
            )
        )
        at += len(q)
    loss, agreement, divergence, overlap = (sums / at).tolist()
    return Precision(name, at, math.exp(loss), agreement, divergence, overlap)
