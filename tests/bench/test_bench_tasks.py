"""`outrider bench tasks`: what is run beside plain decoding, what is kept in its log, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import outrider
from outrider.bench.examples import Source, load_examples
from outrider.cli.main import cli
from outrider.errors import ParameterError
from outrider.support.run_log import RunLog
from tests.helpers.task_data import write

# The log


def test_a_log_keeps_what_is_whole_and_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    log = RunLog(path, {"a": 1, "b": ("x",)})
    log.append({"n": 1})
    log.append({"n": 2})
    assert RunLog(path, {"a": 1, "b": ("x",)}).entries == [{"n": 1}, {"n": 2}]
    with path.open("a") as file:
        file.write('{"n": ')
    assert RunLog(path, {"a": 1, "b": ["x"]}).entries == [{"n": 1}, {"n": 2}]
    assert path.read_text().endswith('{"n": 2}\n')
    with pytest.raises(ParameterError, match=r"other settings \(a: 1 there, 2 here\)"):
        RunLog(path, {"a": 2, "b": ["x"]})
    with pytest.raises(ParameterError, match="another command"):
        RunLog(path)
    for foreign in ("notes\nof mine", '{"mine": 1}', "{\n"):
        path.write_text(foreign)
        with pytest.raises(ParameterError, match="log"):
            RunLog(path, {"a": 1})
        assert path.read_text() == foreign
    with pytest.raises(ParameterError, match="can't be written"):
        RunLog(tmp_path / "no" / "folder", {"a": 1})


# The command


def command(folder: Path, *more: str) -> Result:
    options = ["bench", "tasks", "--target", str(folder), "--dtype", "float64", "--max-new-tokens", "10"]
    return CliRunner().invoke(cli, [*options, *more])


def as_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.slow
def test_drafts_and_lengths_beside_plain_decoding(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    path, log = write(tmp_path, "csv"), tmp_path / "runs.jsonl"
    options = ["--task", "xsum", "--data", str(path), "--draft", "prompt-lookup", "--draft", str(draft_folder)]
    options += ["--num-draft-tokens", "1", "--num-draft-tokens", "3", "--samples", "2", "--log", str(log), "--json"]
    found = as_json(command(target_folder, *options))
    names = [name for spec in ("prompt-lookup", draft_folder) for name in (f"{spec}, K = 1", f"{spec}, K = 3")]
    assert [row["drafting"] for row in found["rows"]] == ["plain", *names] * 2
    greedy, sampled = found["rows"][:5], found["rows"][5:]
    assert {row["setting"] for row in greedy} == {"greedy"}
    for row in greedy[1:]:
        assert row["identical"] == row["prompts"] == 3
        assert row["divergences"] == {}
        assert row["against_plain"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
    assert greedy[4]["acceptance_rate"] is not None
    assert greedy[0]["tokens_per_round"] == 1.0
    assert len(log.read_text().splitlines()) == 1 + 5 * 3 * (1 + 2)
    assert all(row["identical"] is None for row in sampled)
    kept = log.read_text()
    assert as_json(command(target_folder, *options))["rows"] == found["rows"]
    assert log.read_text() == kept
    path.write_text(path.read_text().replace("quick", "slow"))  # another prompt under the old name
    as_json(command(target_folder, *options))
    assert len(log.read_text().splitlines()) == len(kept.splitlines()) + 5 * 3
    refused = command(target_folder, *options, "--metric", "none")
    assert "metric: 'rouge2' there, 'none' here" in str(refused.exception)


def test_unconditional_text_has_its_perplexity_on_both_sides(target_folder: Path) -> None:
    found = as_json(command(target_folder, "--task", "lm1b", "--prompts", "3", "--temperature", "1", "--json"))
    plain, drafted = found["rows"]
    for row in (plain, drafted):
        assert 1.0 < row["quality"]["low"] <= row["quality"]["value"] <= row["quality"]["high"]
    assert drafted["against_plain"]["value"] == pytest.approx(drafted["quality"]["value"] - plain["quality"]["value"])


@pytest.mark.slow
def test_code_that_the_default_model_writes_is_run_and_passes() -> None:
    """HumanEval/23, the length of a string, which SmolLM2 solves greedily."""
    options = ["bench", "tasks", "--dtype", "float32", "--prompts", "23-23", "--max-new-tokens", "40", "--temperature", "0"]
    rows = as_json(CliRunner().invoke(cli, [*options, "--execute-generated-code", "--json"]))["rows"]
    assert [row["quality"]["value"] for row in rows] == [1.0, 1.0]
    assert rows[1]["identical"] == 1


def test_random_weights_write_no_code(target_folder: Path) -> None:
    options = ["--prompts", "23-23", "--temperature", "0", "--execute-generated-code", "--json"]
    rows = as_json(command(target_folder, *options))["rows"]
    assert [row["quality"]["value"] for row in rows] == [0.0, 0.0]


def test_the_table_of_a_file_without_references(target_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "the quick", "id": "q"}\n{"prompt": "0123"}\n')
    result = command(target_folder, "--task", f"jsonl:{path}", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "2 of 2" in result.stdout
    assert "pass@1" not in result.stdout
    assert "too narrow" not in result.stdout  # no intervals without a metric
    path.write_text('{"prompt": "the quick", "reference": "fox"}\n')
    scored = command(target_folder, "--task", f"jsonl:{path}", "--metric", "exact", "--temperature", "0")
    assert "intervals from 1 prompts are too narrow" in scored.stdout


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-draft-tokens", "65", "num_draft_tokens must be a whole number in 1 … 64"),
        ("--max-new-tokens", "0", "max_new_tokens must be a whole number of 1 or more"),
        ("--samples", "0", "samples must be a whole number of 1 or more"),
        ("--temperature", "-1", "temperature"),
        ("--top-p", "0", "top_p"),
    ],
)
def test_bad_numbers_are_refused(target_folder: Path, option: str, value: str, message: str) -> None:
    result = command(target_folder, "--task", "chat", option, value)
    assert isinstance(result.exception, ParameterError), result.output
    assert message in str(result.exception)


def test_what_is_timed_is_what_generate_writes(target_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    as_json(command(target_folder, "--task", "chat", "--prompts", "2-2", "--temperature", "1", "--log", str(log), "--json"))
    model = outrider.load(target_folder, dtype="float64")
    (example,) = load_examples(Source("chat", prompts="2-2"))
    wanted = outrider.generate(model, example.prompt, draft=None, max_new_tokens=10, temperature=1.0, seed=2)
    plain = next(one for one in map(json.loads, log.read_text().splitlines()) if one.get("drafting") == "plain")
    assert (plain["tokens"], plain["text"], plain["rounds"]) == (wanted.tokens, wanted.text, wanted.stats.rounds)
