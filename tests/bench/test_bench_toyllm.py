"""The toyllm experiment with small GPT-2 models made here: same tokens on both sides, figures that follow from the runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import outrider
from outrider.bench.toyllm import PROMPT, Article
from outrider.cli.main import cli
from outrider.errors import ParameterError
from outrider.theory import walltime_factor
from tests.helpers.folders import save_gpt2

TOTAL = 90


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("gpt2") / "large", 0, 3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("gpt2") / "small", 1, 1)


def command(target: Path, draft: Path, *more: str) -> Result:
    options = ["bench", "toyllm", "--target", str(target), "--draft", str(draft), "--dtype", "float64"]
    return CliRunner().invoke(cli, [*options, "--total-tokens", str(TOTAL), "--repetitions", "2", *more])


def as_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_both_sides_write_what_plain_decoding_writes(large: Path, small: Path) -> None:
    found = as_json(command(large, small, "--json"))
    ours, model = found["ours"], outrider.load(large, dtype="float64")
    prompt = len(model.tokenizer.encode(PROMPT))
    wanted = outrider.generate(model, PROMPT, draft=None, max_new_tokens=TOTAL - prompt, ignore_eos=True)
    assert ours["text"] == wanted.text
    assert ours["tokens"] == TOTAL - prompt
    assert ours["identical"]
    assert ours["divergence"] is None
    assert found["article"]["speedup"] == 2.12


def test_predictions_follow_from_the_figures_beside_them(large: Path, small: Path) -> None:
    ours = as_json(command(large, small, "--json"))["ours"]
    tokens_per_round = ours["tokens"] / ours["rounds"]
    assert ours["efficiency"] == pytest.approx(tokens_per_round / 5)
    target, draft = ours["target_ms"], ours["draft_ms"]
    assert ours["predicted_article"] == pytest.approx(tokens_per_round * target / (4 * draft + target))
    assert ours["predicted_closed"] == pytest.approx(walltime_factor(ours["acceptance_rate"], 4, draft / target))
    assert ours["speedup"]["low"] <= ours["speedup"]["median"] <= ours["speedup"]["high"]
    assert ours["predicted_costs"] > 0


def test_a_model_that_drafts_for_itself_has_every_token_accepted(large: Path) -> None:
    ours = as_json(command(large, large, "--num-draft-tokens", "3", "--json"))["ours"]
    assert ours["acceptance_rate"] == 1.0
    assert ours["rounds"] == -(-ours["tokens"] // 4)


def test_the_article_predicts_what_it_says_from_its_own_figures() -> None:
    theirs = Article()
    assert theirs.efficiency * 5 * theirs.target_ms / (4 * theirs.draft_ms + theirs.target_ms) == pytest.approx(
        2.46, abs=5e-3
    )
    assert theirs.plain_seconds / theirs.speculative_seconds == pytest.approx(theirs.speedup, abs=0.01)


def test_the_table_and_the_log(large: Path, small: Path, tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    first = command(large, small, "--log", str(log))
    assert first.exit_code == 0, first.output
    assert "2.12×" in first.stdout
    assert PROMPT in first.stdout
    kept = log.read_text()
    assert len(kept.splitlines()) == 1 + 4
    assert command(large, small, "--log", str(log)).stdout == first.stdout
    assert log.read_text() == kept
    refused = command(large, small, "--log", str(log), "--num-draft-tokens", "5")
    assert isinstance(refused.exception, ParameterError)
    assert "num_draft_tokens: 4 there, 5 here" in str(refused.exception)


@pytest.mark.parametrize(("total", "message"), [("129", "128 at most"), ("5", "more than the prompt's")])
def test_totals_that_do_not_fit_are_refused(large: Path, small: Path, total: str, message: str) -> None:
    result = command(large, small, "--total-tokens", total)
    assert isinstance(result.exception, ParameterError)
    assert message in str(result.exception)
