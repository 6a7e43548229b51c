"""From logits to the continuations that beam search ranks: log-probabilities, the best few, read back in one transfer."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.beam.state import Continuations, Path
from outrider.sampling.penalties import apply_processors
from outrider.settings.sampling import LogitsProcessor
from outrider.support.device_data import index


@dataclass(frozen=True)
class BeamLaw:
    """What tokens score: a model's log-probabilities, and what is forbidden or forced where a hypothesis has come to.

    As in transformers: `bias` is added to them, then each processor sees a hypothesis, behind the tokens of `prefix`.
    normalised: whether what is left sums to one again. greedy: whether there is one beam, for which bias and processors see
    logits instead (a repetition penalty tells them apart), and what is left sums to one in any case.
    """

    prefix: tuple[int, ...] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    processors: tuple[LogitsProcessor, ...] = ()
    normalised: bool = False
    greedy: bool = False

    def logprobs(self, logits: Tensor, paths: Many[Path]) -> Tensor:
        """Of each hypothesis. [M, V] → [M, V], in float32, or float64 if the logits are."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        out = wide.clone() if self.greedy else wide.log_softmax(-1)
        if self.bias:
            tokens = index(list(self.bias), out.device)
            out.index_add_(-1, tokens, out.new_tensor(list(self.bias.values())).expand(len(out), -1))
        if self.processors:
            out = torch.stack([self._processed(row, path) for row, path in zip(out, paths, strict=True)])
        return out.log_softmax(-1) if self.normalised or self.greedy else out

    def _processed(self, row: Tensor, path: Path) -> Tensor:
        tokens = index([*self.prefix, *path], row.device)
        return apply_processors(row, tokens, len(self.prefix), self.processors)


def continuations(wide: Tensor, count: int) -> list[Continuations | None]:
    """The `count` best tokens of each row of log-probabilities, equal ones by id. [M, V] → M; impossible tokens left out.

    None where a row is no distribution: an engine's fault, or a dead end of a constraint where what is left is normalised.
    """
    best = wide.topk(min(count, wide.shape[-1]), dim=-1)
    # Which of several equal tokens at the edge `topk` takes is not said: rows with such an edge are sorted.
    tied = (wide >= best.values[:, -1:]).sum(-1) > best.values.shape[-1]
    packed = torch.cat([best.values.double(), best.indices.double(), tied.double().unsqueeze(-1)], dim=-1).tolist()
    width = best.values.shape[-1]
    return [_continuations(row[:width], row[width:-1], wide[i] if row[-1] else None, width) for i, row in enumerate(packed)]


def _continuations(logprobs: list[float], tokens: list[float], whole: Tensor | None, count: int) -> Continuations | None:
    if logprobs[0] != logprobs[0]:
        return None
    if whole is not None:
        ranked = whole.sort(descending=True, stable=True)
        logprobs, tokens = ranked.values[:count].double().tolist(), ranked.indices[:count].tolist()
    pairs = sorted((-logprob, int(token)) for logprob, token in zip(logprobs, tokens, strict=True) if logprob > -torch.inf)
    return Continuations([token for _, token in pairs], [-negative for negative, _ in pairs])
