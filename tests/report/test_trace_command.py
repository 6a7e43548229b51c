"""`outrider generate --trace`: the output stays as it is, the page is there even after an interrupt, bad files are named."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.main import run
from tests.helpers.trace_page import PROMPT, Page


@pytest.fixture
def model(target_folder: Path, draft_folder: Path) -> list[str]:
    models = ["--target", str(target_folder), "--draft", str(draft_folder), "--num-draft-tokens", "3"]
    return [*models, "--dtype", "float64", "--max-new-tokens", "24", "--ignore-eos", "--seed", "1"]


@pytest.mark.slow
def test_the_output_is_the_same_with_a_trace(model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = []
    for options in ([], ["--trace", str(tmp_path / "t.html")]):
        for form in (["--json"], ["--json", "--logprobs"], [], ["--plain", "--json", "--profile"]):
            assert run(["generate", PROMPT, *model, "--temperature", "0.9", *form, *options]) == 0
            captured = capsys.readouterr()
            parsed = json.loads(captured.out) if "--json" in form else captured.out
            got.append((parsed.keys(), parsed["tokens"]) if isinstance(parsed, dict) else (parsed, captured.err))
            if options:
                page = Page((tmp_path / "t.html").read_text(encoding="utf-8"))
                assert len([e for e in page.tokens if e.tag == "span" and "prompt" not in e.kinds]) == 24
                assert bool([e for e in page.tokens if e.tag == "del"]) == ("--plain" not in form)
                assert "temperature" in {e.text for e in page.elements if e.tag == "dt"}
    assert got[:4] == got[4:]
    assert [path.name for path in tmp_path.iterdir()] == ["t.html"]


def test_trace_and_compare_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "x", "--trace", str(tmp_path / "t.html"), "--compare"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "outrider: --trace and --compare exclude each other: leave one out\n"


@pytest.mark.parametrize("name", ["", "nothing/t.html", "file/t.html", "n" * 300, "/dev/full", "/proc/t.html"])
def test_a_file_that_can_not_be_written_is_refused_before_the_model_is_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / name if name else tmp_path
    assert run(["generate", "x", "--target", "/nowhere/model", "--trace", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"outrider: trace {path} can't be written (")
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_an_interrupted_generation_leaves_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.html"
    long = ["generate", "Count from one to a thousand in words.", "--max-new-tokens", "4000", "--ignore-eos"]
    # Whoever runs the tests in the background has interrupts ignored, and children inherit that.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "outrider", *long, "--trace", str(path)]
    # Unbuffered: `communicate` does not see what a buffer has read ahead.
    with subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert re.search(r"^outrider: interrupted after \d+ tokens\n\Z", err.decode(), re.MULTILINE)
    assert b"Traceback" not in err
    page = Page(path.read_text(encoding="utf-8"))
    assert "cut short" in page.text
    shown = "".join(e.text for e in page.tokens if e.tag == "span" and "prompt" not in e.kinds)
    assert (first + out).decode().strip() in shown
