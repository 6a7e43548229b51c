"""Contests of speed: what is parsed, what is run, what is kept in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outrider.bench.servers import served
from outrider.bench.settings import Setting
from outrider.bench.setups import Setup, parse_setup, short_names
from outrider.cli.main import cli
from outrider.endpoint import EndpointError
from outrider.errors import ParameterError
from tests.helpers.openai_server import Server


def test_setups_are_parsed() -> None:
    assert parse_setup("int8") == Setup("int8", "int8", "auto", ())
    assert parse_setup("int8@openvino + a/b:dtype=int4") == Setup(
        "int8@openvino + a/b:dtype=int4", "int8", "openvino", ("a/b:dtype=int4",)
    )
    assert parse_setup("int8+suffix + a/b").drafts == ("suffix", "a/b")
    for bad in ("", "int8 +", "int8@ + suffix", "+ suffix", "int8 + suffix + "):
        with pytest.raises(ParameterError, match="setup must be"):
            parse_setup(bad)


def test_setups_are_shown_without_folders_where_that_leaves_them_apart() -> None:
    texts = ["int4", "int4 + /a/b c/d.gguf:num_tokens=9", "int8 + /a/e.gguf:dtype=int4", "int8 + Org/e.gguf:dtype=int4"]
    texts.append("int4 + suffix + /a/b.gguf")
    names = short_names([parse_setup(text) for text in texts])
    assert names == ["int4", "int4 + d.gguf:num_tokens=9", *texts[2:4], "int4 + suffix + b.gguf"]
    with pytest.raises(ParameterError, match="'int4' twice"):
        short_names([parse_setup("int4"), parse_setup("int4")])


def test_setups_answer_the_same_prompts_and_resume_from_the_log(target_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    options = ["bench", "setups", "--target", str(target_folder), "--setup", "float32", "--setup", "float64 + prompt-lookup"]
    options += ["--prompts", "23-23", "--max-new-tokens", "6", "--temperature", "0", "--log", str(log), "--json"]
    runner = CliRunner()
    result = runner.invoke(cli, options)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["contender"] for row in rows] == ["float32", "float64 + prompt-lookup"]
    assert rows[0]["against"] == {}
    assert list(rows[1]["against"]) == ["float32"]
    kept = log.read_text()
    assert len(kept.splitlines()) == 3  # how it was made, and two runs
    assert json.loads(runner.invoke(cli, options).stdout)["rows"] == rows
    assert log.read_text() == kept
    longer = runner.invoke(cli, [*options, "--max-new-tokens", "7"])
    assert "max_new_tokens: 6 there, 7 here" in str(longer.exception)


def test_peers_run_on_the_same_folder(target_folder: Path, draft_folder: Path) -> None:
    options = ["bench", "peers", "--target", str(target_folder), "--draft", str(draft_folder), "--prompts", "23-23"]
    options += ["--max-new-tokens", "6", "--temperature", "0.8", "--json"]
    result = CliRunner().invoke(cli, options)
    assert result.exit_code == 0, result.output
    rows = {row["contender"]: row for row in json.loads(result.stdout)["rows"]}
    assert {"generate", "generate + assistant", "generate + lookup", "outrider", "outrider + draft"} <= rows.keys()
    assert set(rows["outrider + draft"]["against"]) == {"generate + assistant", "generate"}


@pytest.mark.usefixtures("cache")  # what is refused has been converted by then
def test_peers_refuse_an_engine_that_transformers_has_not(target_folder: Path) -> None:
    options = ["bench", "peers", "--target", str(target_folder), "--dtype", "int4", "--engine", "openvino"]
    result = CliRunner().invoke(cli, options)
    assert isinstance(result.exception, ParameterError)
    assert "to compare with it" in str(result.exception)


def answer(body: dict[str, Any]) -> tuple[int, bytes]:
    """All the tokens that were asked for, as llama.cpp's server tells of its drafts."""
    timings = {"draft_n": 8, "draft_n_accepted": body["max_tokens"] // 2}
    return 200, json.dumps({"usage": {"completion_tokens": body["max_tokens"]}, "timings": timings}).encode()


def test_servers_answer_beside_ours(target_folder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "rates.svg"
    options = ["bench", "peers", "--no-generate", "--target", str(target_folder), "--setup", "float32", "--plot", str(plot)]
    options += ["--prompts", "23-23", "--max-new-tokens", "6", "--temperature", "0.8", "--json"]
    with Server(answer) as server:
        result = CliRunner().invoke(cli, [*options, "--server", f"other={server.url}", "--version", "theirs=1.2"])
        assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["peers"] == {"theirs": "1.2"}  # they lie in environments of their own
    rows = {row["contender"]: row for row in found["rows"]}
    assert rows.keys() == {"float32", "other"}
    assert (rows["other"]["tokens_per_round"], rows["other"]["acceptance_rate"]) == (2.0, 3 / 8)
    assert list(rows["float32"]["against"]) == ["other"]
    assert [(one["own"], one["peer"]) for one in found["best"]] == [("float32", "other")]
    asked = server.asked[-1]
    expected = {"max_tokens": 6, "temperature": 0.8, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
    expected |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "cache_prompt": False}
    assert {key: asked[key] for key in expected} == expected
    assert all(isinstance(token, int) for token in asked["prompt"])
    assert "other" in plot.read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--server", "other"], "server must be NAME=URL"),
        (["--server", "other=ftp://x"], "server must be NAME=URL"),
        (["--server", "float32=http://x/v1"], "server must have a name of its own, got float32"),
        (["--server", "a=http://x/v1", "--server", "a=http://y/v1"], "server must have a name of its own, got a"),
        (["--server", "a=http://127.0.0.1:9/v1"], "endpoint http://127.0.0.1:9/v1 gave no answer (ConnectionError)"),
        ([], "--no-generate leaves nothing to compare"),
        (["--server", "a=http://x/v1", "--dtype", "float64"], "--dtype is for what --generate compares"),
        (["--server", "a=http://x/v1", "--version", "1.2"], "version must be NAME=VERSION, got '1.2'"),
        (["--server", "a=http://x/v1", "--plot", "rates.txt"], "plot must be a .svg, .png or .pdf file"),
    ],
)
def test_servers_are_named_once_and_by_their_address(target_folder: Path, more: list[str], said: str) -> None:
    options = ["bench", "peers", "--no-generate", "--target", str(target_folder), "--setup", "float32", "--prompts", "23-23"]
    result = CliRunner().invoke(cli, [*options, *more])
    assert said in str(result.exception) + result.output


@pytest.mark.parametrize("draft", [["suffix"], ["early-exit"], ["prompt-lookup", "suffix"]])
def test_a_draft_that_generate_has_no_use_for_is_refused(target_folder: Path, draft: list[str]) -> None:
    """Or the contenders with a draft would be missing without a word."""
    named = [word for one in draft for word in ("--draft", one)]
    result = CliRunner().invoke(cli, ["bench", "peers", "--target", str(target_folder), "--dtype", "float32", *named])
    assert f"draft must be one model, by which generate is assisted, too, got {' and '.join(draft)}" in str(result.exception)


@pytest.mark.parametrize("body", [b"{}", b'{"usage": {}}', b'{"usage": {"completion_tokens": 0}}', b"[]", b"none"])
def test_answers_that_count_no_tokens_are_refused(body: bytes) -> None:
    with Server(lambda _: (200, body)) as server, pytest.raises(EndpointError, match="endpoint http"):
        served(server.url)([1, 2], Setting(0.0, 1.0), 4, 0)
