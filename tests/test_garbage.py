"""Garbage is looked for as a user has it set; imports and loading are left alone."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.main import run
from outrider.garbage import Collector, uncollected

USED = """
import gc
from outrider.cli import main, models
usual, loaded = gc.get_threshold(), models.ModelChoice._load_target
def load(choice, pack):
    assert gc.get_threshold()[0] > 1000 * usual[0]
    return loaded(choice, pack)
models.ModelChoice._load_target = load
ran = main.run
def run(arguments):
    assert gc.get_threshold()[0] > 1000 * usual[0]
    code = ran(arguments)
    assert gc.get_threshold() == usual and gc.get_freeze_count() > 100_000
    return code
main.run = run
main.main(["generate", "hi", "--target", {folder!r}, "--max-new-tokens", "3", "--plain"])
"""


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


def test_a_process_of_ours_looks_seldom_until_its_target_is_there(target_folder: Path, cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USED.format(folder=str(target_folder))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_process_of_a_user_is_left_alone(target_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` and `load` within another program change nothing of how it looks for garbage."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    before = gc.isenabled(), gc.get_threshold()
    assert run(["generate", "hi", "--target", str(target_folder), "--max-new-tokens", "3"]) == 0
    Collector().loaded()
    assert (gc.isenabled(), gc.get_threshold()) == before
    assert not frozen
