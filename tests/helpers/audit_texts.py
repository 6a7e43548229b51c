"""Texts to audit, decoded from toy tables by the real decoder, and what the audit reports of them."""

from __future__ import annotations

import torch

from outrider.audit.sampled import TextAudit
from outrider.audit.text import Text
from outrider.audit.verdict import Report, judge
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.toys import table

V = 60
PROMPT = (1, 2)
ONE = SamplingSettings(temperature=1.0)


def written(
    target: TableModel,
    drafter: Drafter | None,
    sampling: SamplingSettings,
    rows: int = 40,
    tokens: int = 100,
    known: bool = True,
    by_position: bool = False,
) -> list[Text]:
    requests = [Request(PROMPT, tokens, RandomStream(3, i, by_position=by_position)) for i in range(rows)]
    new, rounds = decode(target, requests, sampling, drafter, FixedLength(3))
    return [
        Text((*PROMPT, *row), len(PROMPT), tuple(records) if known else ()) for row, records in zip(new, rounds, strict=True)
    ]


def report(
    texts: list[Text], target: TableModel, drafter: Drafter | None, sampling: SamplingSettings, by_position: bool = False
) -> Report:
    audit = TextAudit(target, drafter, sampling, by_position=by_position)
    for text in texts:
        audit.add(text)
    return judge(audit, "")


def target_model() -> TableModel:
    return table(1, V, order=1)


def draft_model() -> ModelDrafter:
    """Half the target's law, half another one."""
    mixed = 0.5 * torch.stack([target_model().probs_after([i]) for i in range(V)])
    mixed = mixed + 0.5 * torch.stack([table(2, V, order=1).probs_after([i]) for i in range(V)])
    return ModelDrafter(TableModel(mixed), step_seconds=0.1)
