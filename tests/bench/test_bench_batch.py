"""`bench batch`: what the cells say of logged runs, and the prediction worked by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from outrider.bench.batches import BatchRun, best_length, predicted_rate, ragged_prompts, summarise
from outrider.bench.settings import AUTO
from outrider.cli.main import run
from outrider.costs import Costs, DraftSeconds
from tests.helpers.folders import make_tokenizer
from tests.helpers.tiny_models import module


def made(size: int, length: int, seconds: float, block: int = 0) -> BatchRun:
    """100 tokens; with drafts in 50 rounds, half of which drafted."""
    rounds = 50 if length else 100
    drafted = length * rounds // 2 if length > 0 else 0
    return BatchRun(size, length, block, 10, 100, seconds, seconds / 10, rounds, drafted, drafted // 2, drafted)


def test_a_round_is_wide_where_any_row_drafts_or_costs_what_its_rows_do() -> None:
    """Four rows, each drafting in half of its rounds: 15/16 of the padded passes are wide, half of each flat one."""
    flat = Costs({1: 1.0, 3: 3.0})
    assert predicted_rate(4, 2, [made(1, 2, 1.0)], flat, DraftSeconds(0.5)) == pytest.approx(
        4 * 2 / (0.5 + 0.5 * (2 * 0.5 + 3.0))
    )
    costs = Costs({1: 1.0, 3: 3.0}, company=4)
    assert predicted_rate(4, 0, [made(1, 0, 1.0)], costs, DraftSeconds(0.5)) == 4.0
    wide = 1 - 0.5**4
    assert predicted_rate(4, 2, [made(1, 2, 1.0)], costs, DraftSeconds(0.5)) == pytest.approx(
        4 * 2 / ((1 - wide) + wide * (2 * 0.5 + 3.0))
    )


def test_cells_pair_blocks_and_the_best_length_is_by_decoding_time() -> None:
    tables = {1: Costs({1: 1.0, 3: 1.1}), 4: Costs({1: 1.0, 3: 3.0})}
    runs = [made(size, 0, 10.0, block) for size in (1, 4) for block in (0, 1)]
    runs += [made(1, 2, 5.0, block) for block in (0, 1)] + [made(4, 2, 20.0, block) for block in (0, 1)]
    cells = summarise([*runs, made(4, AUTO, 10.0)], lambda size: (tables[size], DraftSeconds()))
    assert [(cell.batch_size, cell.length) for cell in cells] == [(1, 0), (1, 2), (4, 0), (4, 2), (4, AUTO)]
    assert [cell.speedup.median for cell in cells] == [1.0, 2.0, 1.0, 0.5, 1.0]
    assert cells[1].rate == 20.0
    assert cells[1].decode_rate == pytest.approx(200 / 9)
    assert cells[4].predicted is None
    for size, best in ((1, 2), (4, 0)):
        assert best_length(cells, size, predicted=False) == best_length(cells, size, predicted=True) == best


def test_prompts_are_ragged_and_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    assert run(["bench", "batch", "--write-prompts", str(path), "--prompts", "500", "--max-new-tokens", "64"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == ragged_prompts(500, 64)
    assert len({line["prompt"] for line in lines}) > 450
    lengths = {line["max_new_tokens"] for line in lines}
    assert min(lengths) in (16, 17)
    assert max(lengths) in (63, 64)


@pytest.fixture
def roomy(tmp_path: Path) -> Path:
    """A model whose context holds HumanEval's problems, byte by byte."""
    tokenizer = make_tokenizer()
    folder = tmp_path / "roomy"
    module("Llama", 0, torch.float32, vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_prompt_that_does_not_fit_is_one_line(target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "batch",
        "--batch-sizes",
        "1",
        "--lengths",
        "0",
        "--target",
        str(target_folder),
        "--dtype",
        "float64",
    ]
    assert run([*command, "--prompts", "1", "--draft", "suffix"]) == 1
    assert "prompt 0 can't be measured: prompt has" in capsys.readouterr().err


def test_runs_are_resumed_from_the_log(roomy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    models = ["--target", str(roomy), "--dtype", "float64", "--draft", "suffix", "--max-new-tokens", "6"]
    command = ["bench", "batch", "--batch-sizes", "1,2", "--lengths", "0,1", "--prompts", "4", "--block", "2", *models]
    assert run([*command, "--log", str(log), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 2 * 2
    assert len({json.loads(line)["tokens"] for line in lines[1:] if json.loads(line)["block"] == 0}) == 1
    log.write_text("".join(lines[:-3]))
    assert run([*command, "--log", str(log), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert len(log.read_text().splitlines()) == len(lines)
    assert [cell["tokens_per_round"] for cell in again["cells"]] == [cell["tokens_per_round"] for cell in first["cells"]]
    assert asdict(BatchRun(**json.loads(lines[1])))["prompts"] == 2


@pytest.mark.parametrize(("option", "value"), [("--batch-sizes", "0"), ("--lengths", "1,x"), ("--batch-sizes", "")])
def test_wrong_lists_are_one_line(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "batch", option, value]) == 2
    assert capsys.readouterr().err.count("\n") == 1
