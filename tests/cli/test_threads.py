"""--threads: as many threads for every engine of the process, and the cost tables of so many."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.cli.main import run
from outrider.cli.models import MOST_THREADS, ModelChoice


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("command", [["generate", "a", "--max-new-tokens", "2"], ["calibrate"]])
def test_models_are_loaded_and_run_with_so_many(
    command: list[str], target_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str]] = []
    loaded = ModelChoice._load_target

    def load(choice: ModelChoice, pack: bool) -> object:
        seen.append((torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]))
        return loaded(choice, pack)

    monkeypatch.setattr(ModelChoice, "_load_target", load)
    assert run([*command, "--target", str(target_folder), "--threads", "3"]) == 0
    assert seen == [(3, "3")]
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("count", ["0", "-1", str(MOST_THREADS + 1)])
def test_a_number_out_of_range_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "a", "--threads", count]) == 2
    said = f"outrider: threads must be a whole number in 1 … {MOST_THREADS}, got {count}\n"
    assert capsys.readouterr().err == said
