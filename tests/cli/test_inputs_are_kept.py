"""What a user gave is not overwritten, not silently overruled and not lost: files, options, output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.bench.quality import Mean, estimate
from outrider.cli.main import run
from outrider.endpoint import EndpointError, check_reachable


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_an_input_is_no_place_for_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    text, lines = tmp_path / "folder" / "text.md", tmp_path / "prompts.jsonl"
    text.write_text("some text\n")
    lines.write_text('{"prompt": "hello"}\n')
    link = tmp_path / "link.md"
    link.symlink_to(text)
    commands = [
        ["train-ngram", str(text), "-o", str(text)],
        ["train-ngram", str(tmp_path / "folder"), "-o", str(text)],
        ["train-ngram", str(link), "-o", str(text)],
        ["tune", "--prompts", str(lines), "--output", str(lines)],
        ["audit", "--prompts", str(lines), "--log", str(lines)],
        ["batch", str(lines), "-o", str(lines)],
    ]
    for command in commands:
        assert "must be another file than the input" in refused(capsys, *command)
    assert "trace must end in .html" in refused(capsys, "generate", "--file", str(text), "--trace", str(text))
    assert text.read_text() == "some text\n"
    assert lines.read_text() == '{"prompt": "hello"}\n'


@pytest.mark.slow
def test_the_command_line_goes_before_a_plain_configuration(
    target_folder: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, lines, out = tmp_path / "found.toml", tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    config.write_text(f'target = "{target_folder}"\nplain = true\n')
    lines.write_text('{"prompt": "the quick the quick"}\n')
    options = ["--config", str(config), "--max-new-tokens", "12", "--ignore-eos"]

    def drafted(*more: str) -> int:
        assert run(["generate", "the quick the quick", *options, "--json", *more]) == 0
        found: int = json.loads(capsys.readouterr().out)["stats"]["drafted"]
        return found

    assert drafted() == 0
    assert drafted("--plain", "--draft", "random") == 0
    assert drafted("--draft", "random", "--num-draft-tokens", "2") > 0
    assert drafted("--num-draft-tokens", "2", "--draft", "suffix") > 0
    assert run(["generate", "the quick the quick", *options, "--compare", "--draft", "random"]) == 0
    assert run(["batch", str(lines), "-o", str(out), *options, "--draft", "random", "--num-draft-tokens", "2"]) == 0
    made = [json.loads(line) for line in out.read_text().splitlines()]
    assert any(line.get("stats", {}).get("drafted") for line in made)


def test_an_error_in_a_configuration_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "found.toml"
    config.write_text('num_draft_tokens = "x"\n')
    assert f"config {config}: num_draft_tokens must be" in refused(capsys, "generate", "hi", "--config", str(config))


def test_what_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    twice = ["--logit-bias", "5=-inf", "--logit-bias", "5=2"]
    assert "logit_bias must give each token once, got two for 5" in refused(capsys, "generate", "hi", *twice)
    spec = "suffix:memory=yes,memory=no"
    assert "must have each option once, got two of memory" in refused(capsys, "generate", "hi", "--draft", spec)


@pytest.mark.parametrize("command", ["generate hi --max-new-tokens 3", "theory explain --alpha .8 --c .1"])
def test_a_closed_output_is_said(command: str) -> None:
    line = f"{sys.executable} -m outrider {command} >&-"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("outrider: the output can't be written (standard output is closed)")
    assert done.stderr.count("\n") == 1


def test_one_text_has_no_interval() -> None:
    metric = Mean("alpha", lambda answer: float(len(answer.text)))
    found = estimate(metric, [[1.0, 4.0]])
    assert (found.value, found.low, found.high) == (0.25, None, None)
    assert str(found) == "0.250 (—)"
    assert estimate(metric, [[1.0, 4.0], [3.0, 4.0]]).low is not None


def test_an_address_without_a_scheme_is_told_so() -> None:
    with pytest.raises(EndpointError, match="endpoint must begin with http:// or https://, got 'localhost'"):
        check_reachable("localhost")
