"""The command line as a user or a script runs it."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider import costs
from outrider.cli.main import cli, run
from outrider.generation import Stream
from outrider.pieces import Piece

PROMPT = "the quick brown fox jumps over the quick brown"
STATS = {"rounds", "drafted", "accepted", "acceptance_rate", "mean_acceptance_length", "tokens_per_second", "seconds"}


@pytest.fixture
def model(target_folder: Path) -> list[str]:
    return ["--target", str(target_folder), "--dtype", "float64", "--max-new-tokens", "24", "--ignore-eos"]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    out = output(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_json_is_one_object_with_the_promised_keys(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "generate", PROMPT, *model)
    assert {"text", "tokens", "finish_reason", "seed", "stats"} <= got.keys()
    assert got["stats"].keys() >= STATS
    assert {"prefill", "draft", "verify", "sampling", "other", "total"} <= got["stats"]["seconds"].keys()
    assert len(got["tokens"]) == 24
    assert got["finish_reason"] == "length"


def test_piped_output_is_the_text_and_nothing_else(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    wanted = as_json(capsys, "generate", PROMPT, *model)["text"]
    assert run(["generate", PROMPT, *model]) == 0
    captured = capsys.readouterr()
    assert captured.out == wanted + "\n"
    assert captured.err == ""


def test_what_is_noted_meanwhile_stands_behind_the_line(model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    together = io.StringIO()  # as on a terminal

    def noted(*given: Any) -> None:
        logging.getLogger("outrider").warning("a note")

    monkeypatch.setattr("outrider.generation.review_costs", noted)
    monkeypatch.setattr(sys, "stdout", together)
    handler = logging.StreamHandler(together)
    logging.getLogger().addHandler(handler)
    try:
        assert run(["generate", PROMPT, *model]) == 0
    finally:
        logging.getLogger().removeHandler(handler)
    text, after = together.getvalue().rsplit("\n", 2)[:2]
    assert text
    assert after == "a note"
    assert together.getvalue().count("a note") == 1


def test_prompt_by_argument_file_and_standard_input(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_argument = output(capsys, "generate", PROMPT, *model)
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    assert output(capsys, "generate", "--file", str(path), *model) == by_argument
    for arguments in ([], ["-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
        assert output(capsys, "generate", *arguments, *model) == by_argument


def test_plain_and_drafted_give_the_same_text(
    model: list[str], draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = as_json(capsys, "generate", PROMPT, *model, "--plain")
    assert plain["stats"]["drafted"] == 0
    drafted = as_json(capsys, "generate", PROMPT, *model, "--draft", str(draft_folder), "--num-draft-tokens", "3")
    assert drafted["stats"]["drafted"] > 0
    assert drafted["tokens"] == plain["tokens"]


def test_a_seeds_text_may_be_made_to_depend_on_no_draft(
    model: list[str], draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = ["--temperature", "1", "--seed", "4", "--draft", str(draft_folder), "--num-draft-tokens", "3"]
    for more, said in (([], "differ, as two samples do"), (["--drafter-invariant"], "tokens:      identical")):
        assert run(["generate", PROMPT, *model, *sampled, "--compare", *more]) == 0
        assert said in capsys.readouterr().err
    assert as_json(capsys, "generate", PROMPT, *model, *sampled, *more)["drafter_invariant"] is True
    assert run(["generate", PROMPT, *model, *more, "--num-beams", "2"]) == 2
    assert "--drafter-invariant can't be combined with --num-beams" in capsys.readouterr().err


def test_compare_reports_ratio_and_agreement(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    got = as_json(capsys, "generate", PROMPT, *model, "--compare")
    assert got["identical"] is True
    assert got["speedup"] > 0
    assert got["plain"]["tokens"] == got["tokens"]
    assert run(["generate", PROMPT, *model, "--compare"]) == 0
    captured = capsys.readouterr()
    assert captured.out == got["text"] + "\n"
    assert "speed-up" in captured.err
    assert "identical" in captured.err


def test_compare_takes_what_is_for_drafts_alone(
    model: list[str], draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plain side runs without: each of these is refused where nothing drafts."""
    drafting = ["--draft", str(draft_folder), "--num-draft-tokens", "3"]
    for option, value in (("--alternatives", "2"), ("--lenience", "0.5")):
        got = as_json(capsys, "generate", PROMPT, *model, *drafting, option, value, "--compare")
        assert got["stats"]["drafted"] > 0
        assert got["plain"]["stats"]["drafted"] == 0


@pytest.mark.parametrize("which", [0, 1])
def test_an_interrupted_comparison_keeps_what_the_draft_has_written(
    which: int, model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run with the draft, its first tokens; in the plain one, all of it."""
    wanted = as_json(capsys, "generate", PROMPT, *model)
    plain, streams = Stream.__next__, []

    def interrupted(stream: Stream) -> Piece:
        if stream not in streams:
            streams.append(stream)
        elif len(streams) == which + 1:
            raise KeyboardInterrupt
        return plain(stream)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    try:
        code: Any = run(["generate", PROMPT, *model, "--compare", "--json"])
    except SystemExit as ended:
        code = ended.code
    assert code == 130
    captured = capsys.readouterr()
    found = json.loads(captured.out)["tokens"]
    assert 0 < len(found) <= len(wanted["tokens"])
    assert found == wanted["tokens"][: len(found)]
    assert (len(found) == len(wanted["tokens"])) is bool(which)
    assert "interrupted" in captured.err


def test_the_default_policy_is_reproducible_by_seed(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["generate", PROMPT, *model, "--temperature", "0.8", "--top-p", "0.95", "--seed", "3"]
    first, second = as_json(capsys, *sampled), as_json(capsys, *sampled)
    assert first["tokens"] == second["tokens"]
    assert first["seed"] == 3
    other = as_json(capsys, *sampled[:-1], "4")
    assert other["tokens"] != first["tokens"]


def test_stop_logprobs_and_raw_are_obeyed(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    whole = as_json(capsys, "generate", PROMPT, *model, "--logprobs", "--raw")
    assert len(whole["logprobs"]) == len(whole["tokens"])
    stop = whole["text"][5:8]
    cut = as_json(capsys, "generate", PROMPT, *model, "--stop", stop)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


def test_calibrate_gives_the_promised_keys(
    target_folder: Path, draft_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got = as_json(capsys, "calibrate", "--target", str(target_folder), "--draft", str(draft_folder))
    assert set(got) >= {"verify_seconds", "draft_seconds"}
    assert got["verify_seconds"]["1"] > 0
    assert got["draft_seconds"] > 0
    assert got["draft_seconds_assumed"] == []
    options = ("--target", str(target_folder), "--draft", "prompt-lookup", "--draft", str(draft_folder))
    told = output(capsys, "calibrate", *options)
    assert [line.endswith("measures it)") for line in told.splitlines() if line.startswith("draft ")] == [True, False]


def test_calibrate_forgets_what_drafts_within_drafts_cost(
    target_folder: Path, draft_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    plain = costs.forget_costs

    def forget(model: Any) -> None:
        forgotten.append(model.name)
        plain(model)

    monkeypatch.setattr(costs, "forget_costs", forget)
    as_json(capsys, "calibrate", "--target", str(target_folder), "--draft", f"{draft_folder}:draft=random")
    assert [Path(name).name for name in forgotten] == [target_folder.name, draft_folder.name]


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.commands:
        assert f"Usage: outrider {name}" in output(capsys, name, "--help")
        assert f"outrider {name}" in Path(__file__).parents[2].joinpath("docs", "commands.md").read_text()


def test_help_does_not_load_torch() -> None:
    code = "import sys; from outrider.cli.main import run; run(['--help']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


WRONG = (
    "generate x --temperature -1",
    "generate x --top-p 2",
    "generate x --seed -1",
    "generate x --num-draft-tokens 999",
    "generate x --num-beams 99",
    "generate x --draft sufix",
    "generate x --engine nosuch",
    "generate x --target ./nosuch",
    "generate x --draft ./nosuch",
    "generate x --regex (",
    "generate x --trace ./nosuch/x.html",
    "generate --file nosuch.txt",
    "generate x --config nosuch.toml",
    "batch nosuch.jsonl -o out.jsonl",
    "batch nosuch.jsonl -o out.jsonl --draft sufix",
    "audit --tokens -3",
    "audit --temperature -1",
    "audit --prompts nosuch.txt",
    "audit --target ./nosuch",
    "tune --draft sufix",
    "calibrate --target ./nosuch",
    "bench alpha --temperature -1",
    "bench drafters --target ./nosuch",
    "bench batch --lengths 99",
)


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_with_options_is_told_before_torch_is_loaded(line: str) -> None:
    code = "import sys; from outrider.cli.main import run; assert run(sys.argv[1:]); assert 'torch' not in sys.modules"
    told = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stderr.startswith("outrider: ")


@pytest.mark.slow
def test_without_a_hub_an_unknown_name_is_told_at_once(tmp_path: Path) -> None:
    """Of targets and of drafts, and in Python; huggingface_hub by itself tries again for 23 seconds."""
    nobody = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    lines = [command("generate", "x", *options) for options in (["--target", "nobody/nothing"], ["--draft", "nothing"])]
    for arguments in [*lines, [sys.executable, "-c", "import outrider; outrider.load('nobody/nothing')"]]:
        told = subprocess.run(arguments, env=nobody, capture_output=True, text=True, check=False, timeout=20)
        assert told.returncode == 1
        assert "can't be loaded: We couldn't connect to 'http://127.0.0.1:9'" in told.stderr


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "outrider", *arguments]


def on_a_terminal(arguments: list[str]) -> str:
    """Run with standard output on a pseudo-terminal."""
    parent, child = pty.openpty()
    with subprocess.Popen(command(*arguments), stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(child)
        received = b""
        while True:
            try:
                block = os.read(parent, 65536)
            except OSError:
                break
            if not block:
                break
            received += block
        process.wait()
    os.close(parent)
    assert process.returncode == 0
    return received.decode()


@pytest.mark.slow
def test_a_terminal_shows_origins_in_colours(target_folder: Path) -> None:
    models = ["--target", str(target_folder), "--draft", "self:temperature=2", "--dtype", "float64", "--temperature", "1"]
    length = ["--num-draft-tokens", "2", "--max-new-tokens", "48", "--ignore-eos", "--seed", "1"]
    text = on_a_terminal(["generate", PROMPT, *models, *length])
    assert "\x1b[32m" in text  # accepted
    assert "\x1b[36m" in text  # bonus
    assert "\x1b[1;33m" in text  # recovered
    assert "acceptance rate" in text


def interrupted(*arguments: str, after: float = 20) -> tuple[int, str, str]:
    """Start the default model on a long answer, interrupt it once text has come (with --json, after so many seconds)."""
    long = [
        "generate",
        "Count from one to a thousand in words.",
        "--plain",  # drafts copied from a text that repeats itself would end it in seconds
        "--max-new-tokens",
        "8000",
        "--ignore-eos",
        *arguments,
    ]

    # Whoever runs the tests in the background has interrupts ignored, and children inherit that.
    heeding = ["env", "--default-signal=INT"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*heeding, *command(*long)], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if "--json" in arguments:
            time.sleep(after)
            first = b""
        else:
            first = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, err = process.stdout.read(), process.stderr.read()
        code = process.wait()
    return code, (first + out).decode(), err.decode()


def without_busy(err: str) -> str:
    """What is told besides that the machine is busy, which takes long to measure."""
    return re.sub(r"(?m)^(measuring what passes of|outrider: the machine is busy).*\n", "", err)


@pytest.mark.slow
def test_control_c_half_way_keeps_the_text() -> None:
    code, out, err = interrupted()
    assert code == 130
    assert len(out) >= 20
    assert re.fullmatch(r"\s*outrider: interrupted after \d+ tokens\n", without_busy(err))


@pytest.mark.slow
def test_control_c_half_way_keeps_the_object() -> None:
    for after in (14, 30, 60, 120):  # nothing shows from outside when the model is at work
        code, out, err = interrupted("--json", after=after)
        if out:
            break
    assert code == 130
    assert json.loads(out)["finish_reason"] == "cancelled"
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error() -> None:
    shell = " ".join(command("generate", "Tell_me_a_story", "--max-new-tokens", "60", "--ignore-eos")) + " | head -c 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert without_busy(done.stderr) == ""


def test_an_interrupted_comparison_ends_there(
    target_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a text is not compared with a whole one, which would have to be written first."""

    def interrupted(stream: Any, quiet: bool = False) -> int:
        next(stream)
        stream.close()
        return 130

    monkeypatch.setattr("outrider.cli.generate.show", interrupted)
    with pytest.raises(SystemExit) as ended:
        run(["generate", "hi", "--compare", "--target", str(target_folder), "--max-new-tokens", "30", "--ignore-eos"])
    assert ended.value.code == 130
    assert "speed-up" not in capsys.readouterr().err
