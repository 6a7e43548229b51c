"""The comparison of laws: a model is its own equal, and the figures of two tables are those computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from outrider.bench.precision import compare_laws
from outrider.cli.main import cli
from outrider.errors import ParameterError
from outrider.models.table import TableModel

P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]], dtype=torch.float64)
Q = torch.tensor([[0.4, 0.5, 0.1], [0.2, 0.1, 0.7], [0.2, 0.6, 0.2]], dtype=torch.float64)
TEXT = [0, 1, 2, 2, 0, 1]


def test_two_tables_by_hand() -> None:
    found = compare_laws("q", TableModel(P), TableModel(Q), TEXT)
    p, q = P[TEXT[:-1]], Q[TEXT[:-1]]
    assert found.tokens == 5
    assert found.agreement == pytest.approx(0.6)  # the rows of token 0 differ in their most likely token
    assert found.divergence == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert found.overlap == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), rel=1e-5)
    likely = q.gather(1, torch.tensor(TEXT[1:]).unsqueeze(1))
    assert found.perplexity == pytest.approx(float((-likely.log().mean()).exp()), rel=1e-4)


def test_a_model_is_its_own_equal() -> None:
    found = compare_laws("p", TableModel(P), TableModel(P), TEXT * 40)
    assert found.tokens == 239
    assert (found.agreement, found.divergence) == (1.0, 0.0)
    assert found.overlap == pytest.approx(1.0)


def command(target: Path, folder: Path, sentences: int, *more: str) -> list[dict[str, Any]]:
    """The rows that it prints about a text of so many sentences."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * sentences)
    options = ["bench", "precision", "--target", str(target), "--text", str(text), "--json", *more]
    result = CliRunner().invoke(cli, options, catch_exceptions=False, standalone_mode=False)
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return rows


def test_the_command(target_folder: Path, tmp_path: Path) -> None:
    rows = command(target_folder, tmp_path, 3, "--dtype", "bfloat16")
    assert [row["name"] for row in rows] == ["float32", "bfloat16"]
    assert rows[0]["agreement"] == 1.0
    assert 0.5 < rows[1]["overlap"] < 1.0


def test_a_text_longer_than_the_context_is_cut_or_refused(target_folder: Path, tmp_path: Path) -> None:
    assert command(target_folder, tmp_path, 60, "--dtype", "float32")[0]["tokens"] == 255
    with pytest.raises(ParameterError, match="max_tokens must be 256 or less, the positions of"):
        command(target_folder, tmp_path, 60, "--dtype", "float32", "--max-tokens", "300")


def test_a_text_of_one_token_is_refused() -> None:
    with pytest.raises(ParameterError, match="two tokens"):
        compare_laws("p", TableModel(P), TableModel(P), [0])
