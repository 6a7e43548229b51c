"""`outrider serve` as a process: it answers, is told to end, and says what is wrong before it loads a model."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from outrider.cli.main import run
from tests.helpers.folders import save_model


def begun(*arguments: object) -> tuple[subprocess.Popen[str], str]:
    """→ the process, and where it answers"""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if " answers at " in line:
            return process, line.partition(" answers at ")[2].partition(";")[0]
    raise AssertionError(said)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_until_it_is_told_to_end(how: signal.Signals, target_folder: Path) -> None:
    process, url = begun("--target", target_folder, "--name", "mine", "--batch-size", 2, "--max-new-tokens", 5000)
    body = {"model": "mine", "prompt": "abc", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    found = requests.post(f"{url}/completions", json=body, timeout=60).json()
    assert found["usage"]["completion_tokens"] == 6
    streamed = requests.post(f"{url}/completions", json={**body, "stream": True, "n": 2}, timeout=60, stream=True)
    assert next(streamed.iter_lines())
    process.send_signal(how)
    started = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert "Traceback" not in err
    assert process.returncode == 0
    assert "outrider: 1 text of 6 tokens, " in err  # nobody reads the other two any more


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_texts_under_way(how: signal.Signals, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", 0, max_position_embeddings=8192)
    process, url = begun("--target", folder, "--max-new-tokens", 8000)
    body = {"prompt": "abc", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    streamed = requests.post(f"{url}/completions", json=body, timeout=60, stream=True).iter_lines()
    assert next(streamed)
    process.send_signal(how)
    assert process.stderr is not None
    assert "texts under way have 10 seconds" in process.stderr.readline()
    process.send_signal(how)
    *_, error, done = (line for line in streamed if line)
    assert b"the server ends" in error
    assert done == b"data: [DONE]"
    _, err = process.communicate(timeout=60)
    assert err == "outrider: 0 texts of 0 tokens; requests answered by an error: 1\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "port must be a whole number in 0 … 65535, got 70000"),
        (["--batch-size", "0"], "batch_size must be"),
        (["--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--max-waiting", "-1"], "max_waiting must be"),
        (["--host", "no such host"], "host 'no such host' is no address of this machine"),
        (["--compile"], "compile is for passes of one sequence"),
        (["--draft", "nothing-there"], "nothing-there"),
        (["--target", "/nowhere"], "does not exist"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *arguments]) != 0
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 can't be listened at" in err
    assert "take another" in err


def test_a_draft_that_remembers_texts_is_refused(target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "0", "--target", str(target_folder), "--draft", "suffix:memory=yes"]) == 2
    assert "can't keep texts in a batch" in capsys.readouterr().err
