"""The files of a batch: wrong lines are named, memory is bounded, nothing is lost or doubled when a run goes on."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.batch.jobs import check_prompts
from outrider.batch.journal import Journal
from outrider.cli.main import run
from outrider.errors import ParameterError
from tests.helpers.batch_prompts import DEFAULTS, PROMPTS


@pytest.mark.slow
def test_a_long_file_is_never_held(tmp_path: Path) -> None:
    path, lines = tmp_path / "long.jsonl", 20_000
    path.write_text("".join(json.dumps({"prompt": f"{i} " + "word " * 40}) + "\n" for i in range(lines)))
    tracemalloc.start()
    try:
        prompts = check_prompts(path, DEFAULTS)
        with Journal(tmp_path / "out.jsonl", {}, prompts.count) as journal:
            for job in prompts.jobs():
                journal.append({"index": job.index, "tokens": [1, 2], "text": job.prompt})
        with Journal(tmp_path / "out.jsonl", {}, prompts.count) as journal:
            assert journal.done == lines
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 400_000


BAD: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{", "line 2 is not JSON ("),
    "a list": ("[1]", "line 2 must be a JSON object"),
    "neither": ("{}", "line 2 must have exactly one of prompt, messages, audio"),
    "both": ('{"prompt": "a", "messages": []}', "exactly one of prompt, messages, audio"),
    "empty": ('{"prompt": ""}', "prompt must be text or a list of token ids"),
    "half ids": ('{"prompt": [1, "a"]}', "prompt must be text or a list of token ids"),
    "misspelt": ('{"prompt": "a", "temprature": 1}', "'temprature' must be one of"),
    "hot": ('{"prompt": "a", "temperature": -1}', "temperature must be in 0 … 1e6"),
    "none asked": ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens must be a whole number of 1 or more"),
    "a seed of chance": ('{"prompt": "a", "seed": null}', "seed must be a whole number"),
    "stop": ('{"prompt": "a", "stop": null}', "stop must be a string"),
    "roles": ('{"messages": [{"content": "a"}]}', "messages must be a list of objects with role and content"),
    "a key twice": ('{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
    "half a character": (r'{"prompt": "\ud800 a"}', "must be Unicode characters"),
    "half a character in a message": (
        r'{"messages": [{"role": "user", "content": "\udc00"}]}',
        "must be Unicode characters",
    ),
    "too deep": ('{"prompt": "a", "metadata": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 must be a JSON object"),
    "a schema": ('{"prompt": "a", "json_schema": "{}"}', "json_schema must be a JSON object or null"),
    "no schema": (
        '{"prompt": "a", "json_schema": {"type": "strin"}}',
        "JSON schema can't be used: Invalid type: strin",
    ),
    "a pattern": ('{"prompt": "a", "regex": 1}', "regex must be a string or null"),
    "no pattern": ('{"prompt": "a", "regex": "a(b"}', "line 2: regex can't be used: "),
    "biases": ('{"prompt": "a", "logit_bias": [1]}', "logit_bias must be an object such as"),
    "no token": ('{"prompt": "a", "logit_bias": {"the": 1}}', "logit_bias must be an object such as"),
    "no bias": ('{"prompt": "a", "logit_bias": {"1": "2"}}', "logit_bias must be an object such as"),
    "no float": ('{"prompt": "a", "logit_bias": {"1": 1' + "0" * 400 + "}}", "logit_bias must be an object such as"),
    "a token below 0": ('{"prompt": "a", "logit_bias": {"-1": 2}}', "logit_bias must map token ids of 0 or more"),
    "a switch": ('{"prompt": "a", "logprobs": 1}', "logprobs must be true or false"),
    "an end": ('{"prompt": "a", "ignore_eos": "false"}', "ignore_eos must be true or false"),
    "no number": ('{"prompt": "a", "metadata": [NaN]}', "id and metadata must be JSON, which has no NaN and no Infinity"),
    "bytes": (b'{"prompt": "\xff"}', "line 2 is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_line_is_named_before_a_model_is_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider, "load", lambda *a, **k: pytest.fail("loaded"))
    line, message = BAD[name]
    held = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + held + b"\n")
    assert run(["batch", str(path), "-o", str(tmp_path / "out.jsonl")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--top-p", "1.5"], "top_p must be in (0, 1], got 1.5"), (["--seed", "-1"], "seed must be a whole number in 0")],
)
def test_a_wrong_option_is_not_the_first_lines_fault(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert run(["batch", str(path), "-o", str(tmp_path / "out.jsonl"), "--temperature", "1", *options]) == 2
    assert capsys.readouterr().err.startswith(f"outrider: {told}")


def test_indices_count_prompts_and_not_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n  \n{"prompt": "b", "id": 7}')
    prompts = check_prompts(path, {})
    assert [(job.index, job.prompt, dict(job.passed)) for job in prompts.jobs()] == [(0, "a", {}), (1, "b", {"id": 7})]


def test_an_output_cut_anywhere_in_its_last_line_goes_on_behind_the_line_before(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, {"a": 1}, 9) as journal:
        for index in (4, 2, 7):
            journal.append({"index": index, "tokens": [index], "text": "é"})
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, {"a": 1}, 9) as journal:
            assert [index for index in range(9) if index in journal] == [2, 4]
            journal.append({"index": 7, "tokens": [7], "text": "é"})
        assert path.read_bytes() == whole


def test_an_input_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(4)]
    for changed in ([*lines, lines[0]], lines[:3], [*lines[:3], lines[0]]):
        path.write_text("".join(lines))
        prompts = check_prompts(path, DEFAULTS)
        path.write_text("".join(changed))
        read: list[int] = []
        with pytest.raises(ParameterError, match="has changed since it was checked"):
            read.extend(job.index for job in prompts.jobs())
        assert read == list(range(min(4, len(changed))))


def test_an_output_without_its_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, {"seed": 1}, 2) as journal:
        journal.append({"index": 0, "tokens": [1]})
    (tmp_path / "out.jsonl.run").write_text("")
    with pytest.raises(ParameterError, match=r"lacks its \.run file"):
        Journal(path, {"seed": 2}, 2)


def test_an_output_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, {"seed": 1}, 3) as journal:
        with pytest.raises(ParameterError, match="being written by another process"):
            Journal(path, {"seed": 1}, 3)
        journal.append({"index": 0, "tokens": []})
    with pytest.raises(ParameterError, match=r"seed: 1 there, 2 here.*another --output"):
        Journal(path, {"seed": 2}, 3)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ParameterError, match="twice"):
        Journal(path, {"seed": 1}, 3)
    path.write_text('{"index": 0}\nwhat?\n{"index": 1}\n')
    with pytest.raises(ParameterError, match="line 2 is no record"):
        Journal(path, {"seed": 1}, 3)
    (tmp_path / "out.jsonl.run").unlink()
    with pytest.raises(ParameterError, match="not made by outrider batch"):
        Journal(path, {"seed": 1}, 3)


def test_a_run_that_ends_before_it_begins_leaves_nothing(tmp_path: Path) -> None:
    """As with a target that can't be loaded. What was there stays, and what was measured."""
    path = tmp_path / "out.jsonl"

    def fails(tables: dict[str, Any] | None = None) -> None:
        def run() -> None:
            with Journal(path, {"seed": 1}, 3) as journal:
                if tables is not None:
                    journal.keep_tables(tables)
                raise RuntimeError

        with pytest.raises(RuntimeError):
            run()

    fails()
    assert not list(tmp_path.iterdir())
    fails({"target": {}})
    assert {file.name for file in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.run"}
    fails()
    assert {file.name for file in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.run"}


def test_halves_of_characters_that_are_handed_on_are_written_as_json_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, {"seed": 1}, 3) as journal:
        journal.append({"index": 0, "id": "\ud800 ä"})
    assert json.loads(path.read_text(encoding="utf-8"))["id"] == "\ud800 ä"


def test_an_output_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    for path in (tmp_path, tmp_path / "out"):
        with pytest.raises(ParameterError, match="must be a file, from which a run can go on"):
            Journal(path, {"seed": 1}, 3)


def test_an_output_whose_end_cannot_be_written_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("outrider.batch.journal.os.fsync", fail)
    journal = Journal(tmp_path / "out.jsonl", {"seed": 1}, 3)
    with pytest.raises(ParameterError, match=r"can't be written \(No space left on device\)"), journal:
        pass
    assert journal._file.closed


def batch_command(source: Path, output: Path, target: Path) -> list[str]:
    options = ["--target", str(target), "--dtype", "float64", "--temperature", "1", "--ignore-eos", "--max-new-tokens", "30"]
    return ["batch", str(source), "-o", str(output), "--batch-size", "4", "--num-draft-tokens", "2", *options]


def texts(path: Path) -> dict[int, tuple[list[int], str]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["index"] for one in records}) == len(records)
    return {one["index"]: (one["tokens"], one["text"]) for one in records}


@pytest.mark.slow
def test_killed_three_times_and_gone_on_nothing_is_lost_or_doubled(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    source.write_text("".join(json.dumps({"prompt": f"{PROMPTS[i % 8]} {i}"}) + "\n" for i in range(120)))
    command = batch_command(source, output, target_folder)
    for signal_number, least in ((signal.SIGKILL, 1), (signal.SIGINT, 30), (signal.SIGKILL, 50)):
        # Whoever runs the tests in the background has interrupts ignored, and children inherit that.
        heeding = ["env", "--default-signal=INT", sys.executable, "-m", "outrider"]
        process = subprocess.Popen([*heeding, *command, "--json"], stdout=-1, stderr=-1)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if output.exists() and output.read_bytes().count(b"\n") >= least:
                process.send_signal(signal_number)
                break
            time.sleep(0.002)
        out, err = process.communicate()
        assert process.returncode == (130 if signal_number == signal.SIGINT else -signal.SIGKILL), err
        if signal_number == signal.SIGINT:
            assert b"interrupted after" in err
            assert json.loads(out)["complete"] is False
    held = output.read_bytes().count(b"\n")
    assert 50 <= held < 120
    assert run([*command, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["complete"]
    assert summary["done"] == 120
    assert summary["prompts"] == 120 - summary["before"]
    assert run(batch_command(source, whole, target_folder)) == 0
    assert texts(output) == texts(whole)
    assert sorted(texts(output)) == list(range(120))
    assert run([*command, "--seed", "9"]) == 2
    assert "seed: 0 there, 9 here" in capsys.readouterr().err


def test_fixed_lengths_of_one_draft_go_on_in_batches_of_another_size(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several drafts, which `auto` may be, the one that drafts is chosen by what so many rows cost."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    command = [*batch_command(source, output, target_folder), "--draft", "suffix"]
    assert run(command) == 0
    first = output.read_bytes()
    assert run([*command, "--batch-size", "2"]) == 0
    assert output.read_bytes() == first
    assert run([*command, "--num-draft-tokens", "auto"]) == 2
    for name, draft in (("auto", ["auto"]), ("both", ["suffix", "random"]), ("one text", ["suffix + random"])):
        chosen = batch_command(source, tmp_path / name, target_folder) + [part for one in draft for part in ("--draft", one)]
        assert run(chosen) == 0
        assert run([*chosen, "--batch-size", "2"]) == 2
        assert "batch_size: 4 there, 2 here" in " ".join(capsys.readouterr().err.split())
