"""The matrix of drafters and texts: what is paired, what is noise, what the command prints and keeps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

import outrider
from outrider.bench.drafters import (
    CONTROL,
    Cell,
    Matrix,
    Noise,
    count_runs,
    measure,
    noise_of,
    of_one_text,
    over_all_texts,
    summarise,
)
from outrider.bench.tasks import Task
from outrider.cli.main import cli
from outrider.drafters import Drafter, PromptLookupDrafter, RandomDrafter
from outrider.support.run_log import RunLog

TEXTS = [Task("words", "the quick brown fox the quick"), Task("digits", "0123 0123 01")]


def cell(drafter: str, *pairs: float) -> Cell:
    middle = sorted(pairs)[len(pairs) // 2]
    return Cell("text", drafter, 0.0, middle, (min(pairs), max(pairs)), pairs, 1.0, {}, 1.0, 1.0, None, 1.0, {})


@pytest.mark.slow
def test_pairs_stand_side_by_side_and_fixed_lengths_run_once_where_they_are_greedy(
    target_folder: Path, tmp_path: Path
) -> None:
    model = outrider.load(target_folder, dtype="float64")
    drafters: dict[str, Drafter] = {drafter.name: drafter for drafter in (PromptLookupDrafter(), RandomDrafter())}
    log = tmp_path / "log.jsonl"
    runs = list(measure(model, drafters, TEXTS, Matrix((0.0, 1.0), 12, 2, 2), RunLog(log)))
    assert len(runs) == count_runs(2, 2, (0.0, 1.0), 2)
    for i, run in enumerate(runs):
        if run.policy in ("plain", "adaptive"):
            other = next(near for near in runs[max(0, i - 1) : i + 2] if near.drafter == run.drafter and near is not run)
            assert {run.policy, other.policy} <= {"plain", "adaptive"}
        fixed = [one for one in runs if (one.text, one.drafter, one.temperature) == (run.text, run.drafter, run.temperature)]
        fixed = [one for one in fixed if one.policy == "8"]
        assert len(fixed) == (0 if run.drafter == CONTROL else 2 if run.temperature else 1)
    assert all(run.drafted == 0 for run in runs if run.policy == "plain" or run.drafter == CONTROL)
    assert (
        list(measure(model, drafters, TEXTS, Matrix((0.0, 1.0), 12, 2, 2), RunLog(log))) == runs
    )  # from the log: times, too
    cells = summarise(runs)
    assert [(c.text, c.drafter, c.temperature) for c in cells if c.text == "words" and c.temperature == 0.0] == [
        ("words", name, 0.0) for name in (CONTROL, "prompt-lookup", "random")
    ]
    assert all(len(c.pairs) == 2 and c.spread[0] <= c.speedup <= c.spread[1] for c in cells)
    assert all(c.table == 1.0 and c.captured is None for c in cells if c.drafter == CONTROL)


@pytest.mark.slow
def test_by_position_every_policy_writes_the_plain_text(target_folder: Path) -> None:
    model = outrider.load(target_folder, dtype="float64")
    drafters: dict[str, Drafter] = {"random": RandomDrafter(), "prompt-lookup": PromptLookupDrafter()}
    drafted = {}
    for invariant in (True, False):
        runs = list(measure(model, drafters, TEXTS, Matrix((1.0,), 12, 1, 2, invariant), RunLog(None)))
        drafted[invariant] = sum(run.drafted for run in runs if run.policy == "4")
        same, known = of_one_text(runs)
        assert known == len(TEXTS) * len(drafters) * 4
        assert (same == known) is invariant
    assert min(drafted.values()) > 0


def test_noise_is_what_plain_runs_differ_by() -> None:
    control = cell(CONTROL, math.exp(0.02), math.exp(-0.02), math.exp(0.02))
    near, far = cell("near", 0.97, 0.98, 0.99), cell("far", 0.7, 0.9, 1.1)
    noise = noise_of([control, near, far])
    assert noise.pair == pytest.approx(0.02)
    assert noise.pairs == 3
    # One-sided, 5 % for two cells together: 1.96 standard errors of a median of three, 1.2533 / sqrt 3 of a pair's.
    assert noise.cell == pytest.approx(1 - math.exp(-1.96 * 0.02 * 1.2533 / math.sqrt(3)), rel=1e-3)
    assert noise.slower([control, near, far]) == [far]
    assert Noise(0.02, 3, 0.001).slower([control, near]) == [near]
    assert over_all_texts([cell("a", 0.5, 2.0), cell("a", 1.0), control])["a", 0.0] == pytest.approx(1.0)


def test_the_command_tells_noise_from_slowness(target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.texts.kinds", lambda tokenizer: TEXTS)  # its own don't fit into a toy's context
    options = ["--draft", "prompt-lookup", "--max-new-tokens", "8", "--temperature", "0", "--repetitions", "2"]
    command = ["bench", "drafters", "--target", str(target_folder), "--log", str(tmp_path / "runs.jsonl"), *options]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert "noise: the ratio of two plain runs" in result.stdout
    assert f"all texts, {CONTROL}, temperature 0:" in result.stdout
    again = CliRunner().invoke(cli, [*command, "--json"])  # of the runs in the log
    found = json.loads(again.stdout)
    other = CliRunner().invoke(cli, [*command, "--max-new-tokens", "7"])
    assert "max_new_tokens: 8 there, 7 here" in str(other.exception)
    assert found["noise"]["pairs"] == 2 * len(TEXTS)
    assert {row[0] for row in found["all_texts"]} == {CONTROL, "prompt-lookup"}
    two = ["--draft", "suffix", "--draft", "suffix:min_match=4", "--json", *options[2:]]  # of one name: both have rows
    found_two = json.loads(CliRunner().invoke(cli, [*command[:4], *two]).stdout)
    assert {cell["drafter"] for cell in found_two["cells"]} == {CONTROL, "suffix", "suffix:min_match=4"}
    for text, drafter, _ in found["slower"]:
        assert any(c["speedup"] < 1 for c in found["cells"] if (c["text"], c["drafter"]) == (text, drafter))
