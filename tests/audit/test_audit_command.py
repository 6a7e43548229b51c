"""`outrider audit`: texts saved and audited again, and one line for what can't be audited."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import outrider
from outrider.audit.verdict import UNCLEAR
from outrider.cli.main import cli
from outrider.models.base import end_tokens


def run(*arguments: str) -> tuple[int, str, str]:
    from outrider.cli.main import run as run_cli

    runner = CliRunner()
    with runner.isolation() as streams:
        code = run_cli(["audit", *arguments])
        return code, streams[0].getvalue().decode(), streams[1].getvalue().decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "0"], "tokens must be 1 or more, got 0"),
        (["--temperature", "-1"], "temperature must be in 0 … 1e6"),
        (["--rounding", "-1"], "rounding must be in [0, 100)"),
        (["--log", "/nowhere/x.jsonl"], "there is no folder /nowhere"),
        (["--outputs", "/nowhere/x.jsonl"], "outputs file /nowhere/x.jsonl can't be read"),
        (["--extra", "[1]"], "extra must be a JSON object"),
        (["--extra", "{}"], "give --endpoint, too"),
        (["--outputs", "a", "--tokens", "5"], "--outputs is there already"),
        (["--outputs", "a", "--num-draft-tokens", "2"], "for Outrider's own decoder"),
        (["--temperature", "0", "--plot", "x.svg"], "a greedy distribution has no histogram"),
        (["--outputs", "a", "--endpoint", "b"], "exclude each other"),
        (["--temperature", "1", "--temperature", "0", "--log", "x"], "texts of one temperature"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "gave no answer"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code in (1, 2)
    assert said in err
    assert "Traceback" not in err
    assert not out


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (MemoryError(), "there is not enough memory"),
        (TypeError("a fault of ours"), "Traceback"),
    ],
    ids=["disk", "memory", "fault"],
)
def test_a_failure_is_not_the_verdict_that_a_sampler_is_inexact(
    failure: Exception, said: str, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("outrider.cli.audit._audit", fail)
    monkeypatch.setattr("os.dup2", lambda *_: None)  # the output of this process
    code, _, err = run("--target", str(target_folder), "--tokens", "8")
    assert code == 2
    assert said in err


def test_texts_are_saved_resumed_and_audited_again(target_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "texts.jsonl"
    target = ["--target", str(target_folder), "--dtype", "float32"]
    common = [*target, "--json", "--temperature", "0.8"]
    code, out, _ = run("--tokens", "64", "--log", str(saved), *common)
    first = json.loads(out)
    assert code == 2
    assert first["verdict"] == UNCLEAR  # of 64 tokens
    lines = saved.read_text().splitlines()
    assert len(lines) == first["audits"][0]["texts"]
    code, out, _ = run("--tokens", "64", "--log", str(saved), *common)
    assert json.loads(out)["audits"][0]["histograms"] == first["audits"][0]["histograms"]
    assert saved.read_text().splitlines() == lines  # nothing new was needed
    code, out, _ = run("--outputs", str(saved), "--draft", "self:temperature=1.5", *common)
    assert json.loads(out)["audits"][0]["histograms"] == first["audits"][0]["histograms"]
    code, _, err = run("--log", str(saved), "--draft", "self:temperature=2", *common)
    assert code == 2
    assert "draft is 'self:temperature=1.5', audited is 'self:temperature=2': give --draft" in err
    code, _, err = run("--log", str(saved), "--drafter-invariant", *common)
    assert code == 2
    assert "drafter_invariant is False, audited is True: leave out --drafter-invariant" in err
    assert saved.read_text().splitlines() == lines
    code, _, err = run("--outputs", str(saved), "--temperature", "1", *target)
    assert code == 2
    assert "temperature is 0.8" in err


def test_the_highest_temperature_has_no_higher_one(target_folder: Path) -> None:
    """It was told that it is out of range, with a number that nobody had given."""
    arguments = ["--target", str(target_folder), "--dtype", "float32", "--tokens", "32"]
    code, out, err = run(*arguments, "--temperature", "1e6")
    assert code == 2  # too few to tell
    assert "too few" in out
    assert "must be in 0" not in err
    assert "temperature a tenth higher" not in out
    assert "temperature a tenth higher" in run(*arguments)[1]


def test_texts_by_position_are_resumed_as_such(target_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "texts.jsonl"
    common = ["--target", str(target_folder), "--dtype", "float32", "--tokens", "32", "--log", str(saved)]
    run(*common, "--drafter-invariant")
    lines = saved.read_text()
    assert run(*common, "--drafter-invariant")[0] == 2  # too few to tell
    code, _, err = run(*common)
    assert code == 2
    assert "drafter_invariant is True, audited is False: give --drafter-invariant" in err
    assert saved.read_text() == lines


def test_texts_that_run_over_their_end_are_told(target_folder: Path, tmp_path: Path) -> None:
    """As engines do that look for the end behind an accepted draft: each token may follow the law all the same."""
    end = min(end_tokens(outrider.load(target_folder, dtype="float32")))
    texts = [[5, end, 7], [5, 6, end], [5, 6, 7]]
    path = tmp_path / "outputs.jsonl"
    path.write_text("".join(json.dumps({"prompt": [1, 2, 3 + i], "tokens": text}) + "\n" for i, text in enumerate(texts)))
    arguments = ["--outputs", str(path), "--target", str(target_folder), "--dtype", "float32"]
    assert "1 of 3 texts go on behind an end-of-sequence token" in run(*arguments)[1]
    assert json.loads(run(*arguments, "--json")[1])["audits"][0]["run_over"] == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "no 'prompt'"),
        ("[1, 2]", "it is list, no object"),
        ("x", "got 'x'"),
        ('{"prompt": "a", "tokens": [true]}', "token ids must be a list of whole numbers"),
        ('{"prompt": "a", "tokens": [99999999]}', "another tokenizer?"),
        ('{"prompt": "a", "tokens": []}', "has no tokens, so it tells nothing"),
        (json.dumps({"prompt": "a", "tokens": [5] * 300}), "has 256 positions: leave it out"),
        ('{"prompt": "a", "tokens": [5], "temprature": 0.9}', "did you mean 'temperature'?"),
        ('{"prompt": "a", "tokens": [5], "repetition_penalty": 1.3}', "repetition_penalty is 1.3, and only temperature"),
        ('{"prompt": "a", "tokens": [5], "temperature": "hot"}', "could not convert string to float"),
        ('{"prompt": "a", "tokens": [5], "temperature": NaN}', "temperature must be a finite number"),
    ],
)
def test_a_bad_line_is_named(line: str, said: str, target_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text(line + "\n")
    code, _, err = run("--outputs", str(path), "--target", str(target_folder))
    assert code == 2
    assert "line 1" in err
    assert said in err


def test_the_command_is_listed() -> None:
    assert "audit" in cli.commands


@pytest.mark.parametrize("extra", ["suffix:memory=yes", "suffix:store=/tmp/nowhere.store"])
def test_a_draft_that_remembers_the_text_is_refused(extra: str) -> None:
    code, _, err = run("--draft", extra, "--dtype", "float32")
    assert code == 2
    assert "remembers earlier texts" in err


def test_repeated_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    line = json.dumps({"prompt": "a", "tokens": list(range(5, 45))})
    path.write_text(f"{line}\n{line}\n")
    code, _, err = run("--outputs", str(path))
    assert code == 2
    assert "repeats line 1" in err
