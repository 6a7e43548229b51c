"""Quantized models that are kept in the cache folder: the very models, read while nothing that they are made of changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from outrider.kernels.models import kernels
from outrider.models import loading, pretrained
from outrider.models.loading import load_transformers
from outrider.models.weights import kept
from tests.helpers.folders import save_encoder_decoder, save_model

pytestmark = pytest.mark.skipif(kernels() is None, reason="this machine builds no kernels")


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kept, "LEAST", 0)
    monkeypatch.setattr(kept, "ROOM", 0)  # the disk of whoever runs the tests may be nearly full
    caplog.set_level("DEBUG", kept.__name__)  # a failure shows why nothing was kept


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that are read from their own files."""
    found: list[str] = []
    before = pretrained.read_pretrained

    def watched(source: Any, dtype: Any, name: str, *rest: Any) -> Any:
        found.append(name)
        return before(source, dtype, name, *rest)

    monkeypatch.setattr(loading, "read_pretrained", watched)
    return found


def files(cache: Path) -> list[Path]:
    return sorted((cache / kept.FOLDER).glob("*/*"))


def logits(model: Any) -> Tensor:
    source = model.open(model.stand_in()) if hasattr(model, "stand_in") else model.open()
    out: Tensor = model.score([source], torch.tensor([[3, 5, 7, 4]]), [4])
    source.close()
    return out


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("Llama", "int8"), ("Llama", "int4"), ("Qwen3", "int4"), ("Gemma2", "int8"), ("GPTNeoX", "int8")],
)
def test_the_second_start_reads_the_very_model(
    architecture: str, dtype: str, tmp_path: Path, cache: Path, rounds: list[str]
) -> None:
    folder = save_model(tmp_path / "model", 0, architecture=architecture)
    first = load_transformers(folder, dtype=dtype)
    second = load_transformers(folder, dtype=dtype)
    assert len(rounds) == 1
    assert (second.name, second.dtype_name, second.weight_bytes) == (first.name, first.dtype_name, first.weight_bytes)
    assert torch.equal(logits(first), logits(second))
    told = [dict(model.module.named_parameters()) | dict(model.module.named_buffers()) for model in (first, second)]
    assert told[0].keys() == told[1].keys()
    assert all(torch.equal(a, told[1][name]) and a.dtype is told[1][name].dtype for name, a in told[0].items())
    texts = [
        outrider.generate(model, "the cat", max_new_tokens=12, draft="prompt-lookup", seed=1).tokens
        for model in (first, second)
    ]
    assert texts[0] == texts[1]


def test_an_encoder_decoder_is_kept(tmp_path: Path, cache: Path, rounds: list[str]) -> None:
    folder = save_encoder_decoder(tmp_path / "model", "Bart")
    first, second = (load_transformers(folder, dtype="int8") for _ in range(2))
    texts = [outrider.generate(model, "the cat", max_new_tokens=8, temperature=0).tokens for model in (first, second)]
    assert texts[0] == texts[1]
    assert len(rounds) == 1


def _another_weight(folder: Path) -> None:
    other = save_model(folder.parent / "other", 1)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")


def _touched(folder: Path) -> None:
    os.utime(folder / "config.json", (1.0, 1.0))


@pytest.mark.parametrize("change", [_another_weight, _touched])
def test_a_model_whose_files_changed_is_read_anew_and_takes_the_place(
    change: Callable[[Path], None], tmp_path: Path, cache: Path, rounds: list[str]
) -> None:
    folder = save_model(tmp_path / "model", 0)
    before, (first,) = logits(load_transformers(folder, dtype="int8")), files(cache)
    change(folder)
    after, (second,) = logits(load_transformers(folder, dtype="int8")), files(cache)
    assert len(rounds) == 2
    assert first != second
    assert torch.equal(before, after) == (change is _touched)


def test_bits_cuts_and_folders_are_kept_apart(tmp_path: Path, cache: Path, rounds: list[str]) -> None:
    folders = [save_model(tmp_path / name / "model", seed) for seed, name in enumerate("ab")]
    for _ in range(2):
        made = [load_transformers(folder, dtype=dtype) for folder in folders for dtype in ("int8", "int4")]
        made.append(load_transformers(folders[0], dtype="int8", num_tokens=40))
        found = [logits(model) for model in made]
        assert not any(a.shape == b.shape and torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    assert len(rounds) == len(files(cache)) == 5


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_a_damaged_file_is_made_again(damage: bytes | None, tmp_path: Path, cache: Path, rounds: list[str]) -> None:
    folder = save_model(tmp_path / "model", 0)
    want = logits(load_transformers(folder, dtype="int8"))
    (file,) = files(cache)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if damage is None else damage)
    for _ in range(2):
        assert torch.equal(logits(load_transformers(folder, dtype="int8")), want)
    assert len(rounds) == 2


@pytest.mark.parametrize(
    "trouble",
    ["too small", "no room", "the disk fills up", "nothing can be pickled", "none of its kind can be made", "no folder"],
)
def test_what_cannot_be_kept_is_loaded_all_the_same(
    trouble: str, tmp_path: Path, cache: Path, rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model", 0)

    def fails(*given: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    if trouble == "too small":
        monkeypatch.setattr(kept, "LEAST", 10**9)
    elif trouble == "no room":
        monkeypatch.setattr(kept, "ROOM", 10**18)
    elif trouble == "none of its kind can be made":
        monkeypatch.setattr(kept, "deepcopy", fails)
    elif trouble == "the disk fills up":
        monkeypatch.setattr(torch, "save", fails)
    elif trouble == "nothing can be pickled":
        monkeypatch.setattr(kept, "_PICKLE", None)
    else:
        (cache / kept.FOLDER).write_text("a file")
    for _ in range(2):
        load_transformers(folder, dtype="int8")
    assert len(rounds) == 2
    assert trouble == "no folder" or not list((cache / kept.FOLDER).glob("*"))


def test_a_disk_that_does_not_say_what_it_holds_is_written_to(
    tmp_path: Path, cache: Path, rounds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "ROOM", 2 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=0, used=0, free=0))
    folder = save_model(tmp_path / "model", 0)
    for _ in range(2):
        load_transformers(folder, dtype="int8")
    assert len(rounds) == 1


def test_what_is_written_into_a_model_stays_in_its_process(tmp_path: Path, cache: Path, rounds: list[str]) -> None:
    folder = save_model(tmp_path / "model", 0)
    load_transformers(folder, dtype="int8")
    mapped = load_transformers(folder, dtype="int8")
    want = logits(mapped)
    with torch.no_grad():
        next(mapped.module.parameters()).fill_(2.0)
    assert not torch.equal(logits(mapped), want)
    assert torch.equal(logits(load_transformers(folder, dtype="int8")), want)
    assert len(rounds) == 1


@pytest.mark.slow
def test_a_kept_model_is_recorded_as_the_first_was(tmp_path: Path, cache: Path, rounds: list[str]) -> None:
    """It would be recorded anew otherwise: what transformers notes when a model is made belongs to what is recorded."""
    folder = save_model(tmp_path / "model", 0)
    program = (
        "import sys, outrider; from outrider.models.weights import kept; "
        "from outrider.models.passes.graph import describe_pass; "
        f"kept.LEAST = 0; model = outrider.load({str(folder)!r}, dtype='int8'); print(describe_pass(model)); "
        "out = model.module(input_ids=__import__('torch').tensor([[3, 4]]), output_hidden_states=True); "
        "print(len(out.hidden_states))"
    )
    found = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert len(files(cache)) == 1
    assert found[0] == found[1] != ""
