"""Beam search: from logits to continuations, and hypotheses that have none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.beam import BeamDecoder, BeamSettings
from outrider.beam.laws import BeamLaw, continuations
from outrider.beam.length import BeamLength
from outrider.beam.state import Continuations
from outrider.beam.task import BeamTask
from outrider.errors import NumericalError
from outrider.models.table import TableModel


def test_of_equal_tokens_the_smaller_ids_come_first() -> None:
    flat = torch.zeros(1, 50)
    flat[0, 30] = 1.0
    assert continuations(flat, 4) == [Continuations([30, 0, 1, 2], [1.0, 0.0, 0.0, 0.0])]


def test_impossible_tokens_are_no_continuations_and_nan_is_no_law() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 3] = 0.0
    (found,) = continuations(logits, 4)
    assert found is not None
    assert found.tokens == [3]
    assert continuations(torch.full((1, 5), torch.nan), 2) == [None]


def texts(target: TableModel, draft: TableModel | None, normalised: bool, dead: int) -> list[tuple[int, ...]]:
    """Of a search whose constraint allows nothing after the token `dead`."""

    def allowed(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf) if ids[0, -1] == dead else scores

    task = BeamTask([0], None, BeamLaw((0,), {}, (allowed,), normalised))
    search = BeamDecoder(target, task, BeamSettings(2), 4, frozenset(), draft, BeamLength(2))
    list(search.rounds())
    return [one.tokens for one in search.state.finished]


@pytest.mark.parametrize("normalised", [False, True])
def test_a_dead_end_that_only_the_draft_runs_into_does_not_end_the_search(normalised: bool) -> None:
    """Where what is left is normalised it is NaN, and the search raised, though the target would never follow it."""
    target = TableModel(torch.tensor([[0.45, 0.45, 0.1]] * 3, dtype=torch.float64), "target")
    draft = TableModel(torch.tensor([[0.1, 0.1, 0.8]] * 3, dtype=torch.float64), "draft")
    plain = texts(target, None, normalised, 2)
    assert texts(target, draft, normalised, 2) == plain == [(0, 0, 0, 0), (0, 0, 0, 1)]


def test_a_dead_end_that_the_target_follows_is_told() -> None:
    table = TableModel(torch.tensor([[0.1, 0.1, 0.8]] * 3, dtype=torch.float64), "target")
    for draft in (None, table):
        with pytest.raises(NumericalError, match="NaN"):
            texts(table, draft, True, 2)
