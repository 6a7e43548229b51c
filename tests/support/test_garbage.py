"""Garbage is looked for as a user has it set; imports and loading are left alone."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import main, run
from outrider.cli.models import ModelChoice
from outrider.support.garbage import Collector, uncollected


def fail_within() -> None:
    with uncollected():
        assert not gc.isenabled()
        raise ValueError("within")


@pytest.mark.parametrize("on", [True, False])
def test_it_is_as_before_afterwards(on: bool) -> None:
    was = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(ValueError, match="within"):
            fail_within()
        assert gc.isenabled() is on
    finally:
        (gc.enable if was else gc.disable)()


def test_a_process_of_ours_looks_seldom_until_its_target_is_there(
    target_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, loaded = gc.get_threshold(), ModelChoice._load_target
    frozen: list[tuple[int, int, int]] = []

    def load(choice: ModelChoice, pack: bool) -> Any:
        assert gc.get_threshold()[0] > 100 * usual[0]
        return loaded(choice, pack)

    monkeypatch.setattr(ModelChoice, "_load_target", load)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.get_threshold()))
    monkeypatch.setattr("outrider.cli.main.collector", collector := Collector())
    monkeypatch.setattr("outrider.cli.models.collector", collector)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["generate", "hi", "--target", str(target_folder), "--max-new-tokens", "3", "--plain"])
        assert ended.value.code == 0
        assert gc.get_threshold() == usual
        # Once it is loaded, and at the end, but with Triton, which a torch for GPUs has.
        assert [thresholds == usual for thresholds in frozen] == ([False] if "triton" in sys.modules else [False, True])
    finally:
        gc.set_threshold(*usual)


def test_a_process_of_a_user_is_left_alone(target_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` and `load` within another program change nothing of how it looks for garbage."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    before = gc.isenabled(), gc.get_threshold()
    assert run(["generate", "hi", "--target", str(target_folder), "--max-new-tokens", "3"]) == 0
    Collector().loaded()
    assert (gc.isenabled(), gc.get_threshold()) == before
    assert not frozen
