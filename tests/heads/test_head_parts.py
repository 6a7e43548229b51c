"""What a head is made of is made once a target, and anew when its files change."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.drafters import HeadDrafter
from outrider.heads import parts
from outrider.heads.autoregressive import AutoregressiveModel
from outrider.heads.layers import Norm
from outrider.heads.opening import open_head
from outrider.heads.recorded import record_head
from outrider.heads.target_parts import output_rows
from outrider.models.transformers_model import TransformersModel
from tests.helpers.heads import write_head
from tests.helpers.tiny_models import module


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets whose output rows were read, in order."""
    names: list[str] = []

    def counted(target: Any, *args: Any) -> Any:
        names.append(target.name)
        return output_rows(target, *args)

    monkeypatch.setattr("outrider.heads.parts.output_rows", counted)
    return names


def own_target() -> TransformersModel:
    return TransformersModel(module("Llama", 1))


def logits_after(target: TransformersModel, folder: Path) -> torch.Tensor:
    head = open_head(target, folder)
    scored = head.score([head.open()], torch.tensor([[5, 6, 7]]), [3])
    assert scored is not None
    return scored


@pytest.mark.parametrize("kind", ["autoregressive", "blockwise"])
def test_drafters_bound_one_after_the_other_share_what_was_read(kind: Any, tmp_path: Path, readings: list[str]) -> None:
    target, folder = own_target(), write_head(tmp_path, kind)
    first = logits_after(target, folder)
    HeadDrafter(folder).bind(target)
    assert torch.equal(logits_after(target, folder), first)
    assert len(readings) == 1
    logits_after(own_target(), folder)
    assert len(readings) == 2


def test_a_head_that_was_written_again_is_read_again(tmp_path: Path, readings: list[str]) -> None:
    target, folder = own_target(), write_head(tmp_path, "autoregressive")
    before = logits_after(target, folder)
    write_head(folder, "autoregressive", intermediate_size=32)
    assert not torch.equal(logits_after(target, folder), before)
    assert len(readings) == 2


def test_only_the_last_heads_used_are_kept(tmp_path: Path, readings: list[str]) -> None:
    target = own_target()
    folders = [write_head(tmp_path / str(i), "autoregressive") for i in range(parts.KEPT + 1)]
    for folder in folders:
        logits_after(target, folder)
    read = len(readings)
    logits_after(target, folders[-1])
    assert len(readings) == read
    logits_after(target, folders[0])
    assert len(readings) == read + 1


def test_what_is_kept_does_not_keep_the_target(tmp_path: Path) -> None:
    target = own_target()
    logits_after(target, write_head(tmp_path, "autoregressive"))
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_passes_are_recorded_anew_when_the_code_of_a_head_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ordinary = write_head(tmp_path, "autoregressive"), Norm.forward

    def drafted() -> torch.Tensor:
        head = open_head(own_target(), folder)
        assert isinstance(head, AutoregressiveModel)
        assert head.recorded is not None
        scored = head.score_few([head.open()], torch.tensor([[5, 6, 7]]), [3], "last")
        assert scored is not None
        return scored.clone()

    before = drafted()
    assert torch.equal(drafted(), before)
    monkeypatch.setattr(Norm, "forward", lambda self, x: 2.0 * ordinary(self, x))
    assert not torch.equal(drafted(), before)


def test_passes_are_recorded_once_for_drafters_bound_one_after_the_other(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one's, over a cache of its own, give the same bits; another token table of the target makes them anew."""
    recorded: list[AutoregressiveModel] = []

    def counted(model: AutoregressiveModel) -> Any:
        recorded.append(model)
        return record_head(model)

    monkeypatch.setattr("outrider.heads.autoregressive.record_head", counted)
    target, folder = own_target(), write_head(tmp_path, "autoregressive")
    heads = [open_head(target, folder) for _ in range(2)]
    assert len(recorded) == 1
    drafted = []
    for head in heads:
        assert isinstance(head, AutoregressiveModel)
        assert head.recorded is not None
        sequence, out = head.open(), []
        for token in ([5, 6, 7], [8], [9]):
            scored = head.score_few([sequence], torch.tensor([token]), [len(token)], "last")
            assert scored is not None
            out.append(scored.clone())
        drafted.append(out)  # beside the other one's, whose sequence is open
    assert all(torch.equal(a, b) for a, b in zip(*drafted, strict=True))
    assert heads[0]._cache is not heads[1]._cache
    target.module.set_input_embeddings(copy.deepcopy(target.module.get_input_embeddings()))
    open_head(target, folder)
    assert len(recorded) == 2
