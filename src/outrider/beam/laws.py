"""From logits to the continuations that beam search ranks: log-probabilities, the best few, read back in one transfer."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.beam.state import Continuations
from outrider.errors import NumericalError


def continuations(logits: Tensor, count: int) -> list[Continuations]:
    """The `count` most likely tokens of each row, best first, equal ones by id. [M, V] → M; impossible tokens left out.

    Log-softmax in float32, or float64 if the logits are. Raises `NumericalError` where a row is no distribution.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    best = wide.topk(min(count, wide.shape[-1]), dim=-1)
    # Which of several equal tokens at the edge `topk` takes is not said: rows with such an edge are sorted.
    tied = (wide >= best.values[:, -1:]).sum(-1) > best.values.shape[-1]
    packed = torch.cat([best.values.double(), best.indices.double(), tied.double().unsqueeze(-1)], dim=-1).tolist()
    width = best.values.shape[-1]
    return [_continuations(row[:width], row[width:-1], wide[i] if row[-1] else None, width) for i, row in enumerate(packed)]


def _continuations(logprobs: list[float], tokens: list[float], whole: Tensor | None, count: int) -> Continuations:
    if logprobs[0] != logprobs[0]:
        raise NumericalError("the model gave no distribution for a hypothesis: its logits are NaN; try --dtype float32")
    if whole is not None:
        ranked = whole.sort(descending=True, stable=True)
        logprobs, tokens = ranked.values[:count].double().tolist(), ranked.indices[:count].tolist()
    pairs = sorted((-logprob, int(token)) for logprob, token in zip(logprobs, tokens, strict=True) if logprob > -torch.inf)
    return Continuations([token for _, token in pairs], [-negative for negative, _ in pairs])
