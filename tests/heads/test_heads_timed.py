"""What a draft head costs is timed as it drafts: after a pass of its target, on its states, then on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.costs.pass_timer import PassTimer
from outrider.drafters import HeadDrafter
from outrider.heads.engine import HeadSequence
from tests.helpers.heads import Shape, small_target, write_head
from tests.helpers.samples import V
from tests.helpers.tiny_models import tiny


def test_a_heads_pass_is_timed_after_one_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a round: on its own it would find its weights in the caches, and seem twice as quick."""
    target = small_target()
    drafter = HeadDrafter(write_head(tmp_path, "autoregressive", V))
    drafter.bind(target)
    calls: list[str] = []
    for model in (target, drafter.model):
        score = model.score

        def noted(*args: Any, name: str = model.name, score: Any = score) -> Any:
            calls.append(name)
            return score(*args)

        monkeypatch.setattr(model, "score", noted)
    with PassTimer(drafter.model, (1, 3), 8) as timer:
        for size in (1, 3, 1):
            assert timer.time(size) > 0
    assert calls[-6:] == [target.name, drafter.model.name] * 3
    assert target._open == []


@pytest.mark.parametrize("kind", ["autoregressive", "layered"])
def test_a_heads_passes_are_timed_as_it_reads_in_a_round(
    kind: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's states after a pass of the target, its own from then on: other passes, of other costs."""
    target = tiny("Llama")
    drafter = HeadDrafter(write_head(tmp_path, kind))
    drafter.bind(target)
    read: list[tuple[int, int]] = []
    newest = type(drafter.model).newest  # type: ignore[attr-defined]

    def noted(self: Any, rows: list[HeadSequence], counts: list[int], *others: Any) -> Any:
        ((row,), (count,)) = rows, counts
        assert row.base is not None
        read.append((row.length, count if row.length + count - 1 <= row.base.length else -1))
        return newest(self, rows, counts, *others)

    monkeypatch.setattr(type(drafter.model), "newest", noted)
    with PassTimer(drafter.model, (1, 3), 8) as timer:
        for size, again in ((1, False), (1, True), (1, True), (3, False), (1, False)):
            timer.time(size, again)
    assert read == [(8, 1), (9, -1), (10, -1), (8, 3), (8, 1)]
    full = target.max_length
    assert full is not None
    with PassTimer(drafter.model, (1,), full) as timer:  # more than the target can hold: on a sequence of its own
        monkeypatch.setattr(type(drafter.model), "newest", newest)
        assert timer.time(1) > 0
    assert target._open == []


def test_blocks_are_timed_as_often_as_is_asked(tmp_path: Path) -> None:
    """They go on no further than they reach, a timer does."""
    drafter = HeadDrafter(write_head(tmp_path, "blockwise", blocks=2))
    drafter.bind(tiny("Llama"))
    with PassTimer(drafter.model, (1,), 8) as timer:
        assert all(timer.time(1, again=token > 0) > 0 for token in range(5))
