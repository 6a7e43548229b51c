"""Figures of rounds: what is behind the end of a text counts for nothing."""

from __future__ import annotations

import torch

from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import ModelDrafter
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.records import Round, acceptance_by_position, summarise
from outrider.sampling import SamplingSettings


def test_a_text_that_ends_inside_its_draft_counts_what_it_kept() -> None:
    whole, ended = Round((3, 4, 5), 3, 2, "draft"), Round((3, 9), 5, 4, "draft", finish_reason="eos")
    assert (whole.tested, whole.used) == (3, 2)
    assert (ended.tested, ended.used, ended.accepted) == (2, 2, 4)
    assert ended.origins == ("accepted", "accepted")
    stats = summarise([whole, ended])
    assert (stats.tested, stats.accepted, stats.drafted, stats.tokens) == (5, 4, 8, 5)
    assert acceptance_by_position([whole, ended]) == [(2, 2), (2, 2), (1, 0), (0, 0), (0, 0)]


def test_the_printed_rate_is_that_of_the_texts_whatever_comes_behind_their_end() -> None:
    """Draft and target agree in the texts and disagree behind their end token 0: it was .78 where every beta is 1."""
    law = torch.full((5, 5), 0.0, dtype=torch.float64)
    law[1:, :] = 0.2
    target, draft = law.clone(), law.clone()
    target[0, 1], draft[0, 2] = 1.0, 1.0
    requests = [Request([1], 40, RandomStream(0, i), frozenset({0})) for i in range(200)]
    drafter = ModelDrafter(TableModel(draft), step_seconds=0.1)
    _, rounds = decode(TableModel(target), requests, SamplingSettings(temperature=1.0), drafter, FixedLength(8))
    every = [record for row in rounds for record in row]
    assert any(min(record.accepted + 1, record.drafted) > record.tested for record in every)
    assert summarise(every).acceptance_rate == 1.0
