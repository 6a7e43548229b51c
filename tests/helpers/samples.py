"""Continuations drawn end to end, the chi-square against their exact law, and engines with planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from scipy import stats
from torch import Tensor

from outrider.decode import Request, decode
from outrider.draft_length import DraftLength
from outrider.drafters import Drafter
from outrider.models.table import TableModel, TableSequence
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.sampling import SamplingSettings
from tests.helpers.enumerate import target_joint
from tests.helpers.toys import PROMPT, law_of

ALARM = 1e-6
SAMPLES = 3000
FAULTY = SAMPLES // 2  # continuations by which a planted fault has to be seen: half of those that show none in what is right
LENGTH = 4  # tokens whose joint law is tested: all K + 1 positions of a first round with K = 3
V = 3


def samples_of(settings: SamplingSettings) -> int:
    """How many continuations are tested. Greedy ones are all one text, every token of which has to be right."""
    return SAMPLES // 20 if settings.greedy else SAMPLES


def run(
    target: TableModel,
    drafter: Drafter | None,
    settings: SamplingSettings,
    length: DraftLength,
    seed: int = 0,
    new_tokens: int = LENGTH,
    samples: int | None = None,
) -> tuple[list[list[int]], list[Round]]:
    """Many continuations of PROMPT as the rows of one batch. samples: if not `samples_of` the settings."""
    samples = samples_of(settings) if samples is None else samples
    requests = [Request(PROMPT, new_tokens, RandomStream(seed, i)) for i in range(samples)]
    tokens, rounds = decode(target, requests, settings, drafter, length)
    return tokens, [record for row in rounds for record in row]


def p_value(tokens: Sequence[Sequence[int]], target: TableModel, settings: SamplingSettings) -> float:
    """`p_value_of` for a table's law."""
    return p_value_of(tokens, target_joint(law_of(target, settings), V, LENGTH))


def p_value_of(tokens: Sequence[Sequence[int]], joint: Tensor) -> float:
    """Chi-square of the joint counts; cells expected less than 5 times are pooled."""
    counts = Counter(tuple(row) for row in tokens)
    expected = joint.flatten() * len(tokens)
    observed = torch.tensor([counts[tuple(map(int, index))] for index in torch.cartesian_prod(*[torch.arange(V)] * LENGTH)])
    impossible = expected < 1e-9
    if int(observed[impossible].sum()):
        return 0.0
    small = (expected < 5) & ~impossible
    large = ~small & ~impossible
    got = [*observed[large].tolist(), int(observed[small].sum())]
    want = [*expected[large].tolist(), float(expected[small].sum())]
    pairs = [(g, w) for g, w in zip(got, want, strict=True) if w > 0]
    if len(pairs) == 1:
        return 1.0
    got, want = [g for g, _ in pairs], [w for _, w in pairs]
    scale = sum(got) / sum(want)
    return float(stats.chisquare(got, [w * scale for w in want]).pvalue)


class ForgetsTooLittle(TableSequence):
    """Truncation that keeps one token too many, but says otherwise."""

    kept = 0

    @property
    def length(self) -> int:
        return len(self.tokens) - self.kept

    def truncate(self, length: int) -> None:
        end = min(length + 1, len(self.tokens))
        self.kept = end - length
        del self.tokens[end:]


class RollbackOffByOne(TableModel):
    def open(self, reserve: int = 0) -> TableSequence:
        return ForgetsTooLittle()


class KeepsStaleKeys(TableSequence):
    """Truncation to the right length that leaves the last discarded token where the last kept one should be."""

    def truncate(self, length: int) -> None:
        if 0 < length < self.length:
            del self.tokens[length - 1 : -1]
        super().truncate(length)


class StaleAfterRollback(TableModel):
    def open(self, reserve: int = 0) -> TableSequence:
        return KeepsStaleKeys()
