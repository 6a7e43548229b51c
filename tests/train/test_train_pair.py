"""A target and its draft from nothing: they learn, go on where they stopped, and speculate together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from outrider.cli.main import run
from outrider.train.pair import Shape, make_decoder
from tests.helpers.commands import call

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "it", "sleeps"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Documents whose words follow one another in a fixed order from different beginnings."""
    path = tmp_path / "data.jsonl"
    texts = [" ".join((WORDS * 6)[i % len(WORDS) :][:60]) for i in range(80)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def options(data: Path, output: Path, *more: object) -> list[str]:
    shape = ["--layers", 2, "--width", 64, "--draft-layers", 1, "--draft-width", 64, "--vocabulary", 300, "--length", 32]
    speed = ["--steps", 40, "--batch-size", 8, "--every", 20, "--learning-rate", 3e-3]
    return [str(one) for one in ("train", "pair", "-o", output, "--data", data, *shape, *speed, *more)]


@pytest.mark.usefixtures("cache")
@pytest.mark.slow
def test_a_pair_is_trained_goes_on_and_drafts(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "pair"
    stopped = call(capsys, *options(data, output, "--hours", 1e-9, "--json"))
    assert stopped["target"]["steps"] == stopped["draft"]["steps"] == 1
    made = call(capsys, *options(data, output, "--resume", "--json"))
    assert made["target"]["steps"] == made["draft"]["steps"] == 40
    assert made["target"]["held_out_nats"] < 0.5 * stopped["target"]["held_out_nats"] < math.log(300)
    again = call(capsys, *options(data, output, "--resume", "--json"))
    steps = [one["steps"] for one in (again["target"], again["draft"])]
    assert (steps, again["target"]["held_out_nats"]) == ([40, 40], made["target"]["held_out_nats"])
    assert run(options(data, output, "--resume", "--vocabulary", 301)) == 2
    assert "resume must keep data, vocabulary and length" in " ".join(capsys.readouterr().err.split())
    assert run(options(data, output)) == 2
    assert "go on with --resume" in " ".join(capsys.readouterr().err.split())
    table = f"ngram:table={output}/ngrams"
    drafts = [f"{output}/draft", f"{table},order=2", f"{table},order=1"]
    asked = ["bench", "alpha", "--target", f"{output}/target", "--task", "lm1b", "--prompts", "4"]
    asked += ["--temperature", "1", "--temperature", "0"]
    found = call(capsys, *asked, "--max-new-tokens", "24", *(o for draft in drafts for o in ("--draft", draft)), "--json")
    assert {(row["setting"], row["texts"]) for row in found["rows"]} == {("temperature 1, top-p 1", 4), ("greedy", 1)}
    alphas = [row["alpha"]["value"] for row in found["rows"] if row["setting"] != "greedy"]
    assert all(0 < alpha <= 1 for alpha in alphas)
    assert alphas[2] < alphas[1]  # a word says which is next, and the most frequent one does not
    assert alphas[2] < alphas[0]


def test_the_papers_sizes_are_the_papers() -> None:
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in make_decoder(shape, 8192, 128).parameters()) for shape in (Shape(12, 768), Shape(2, 256))
        ]
    assert [round(count / 1e6) for count in counts] == [98, 6]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--width", 100], "width must be a multiple of 64"),
        (["--vocabulary", 100], "vocabulary must be a whole number in 257"),
        (["--length", 8], "length must be a whole number in 16"),
        (["--resume"], "resume needs a checkpoint"),
        (["--data", "/nowhere/text"], "does not exist"),
    ],
)
def test_what_can_not_be_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[object], said: str
) -> None:
    assert run(options(data, tmp_path / "pair", *more)) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_tokens_of_another_model_and_too_little_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "texts.jsonl"
    for line, said in (({"tokens": [1, 2, 3]}, "holds tokens of another model"), ({"text": "one"}, "give more text")):
        source.write_text(json.dumps(line) + "\n")
        assert run(options(source, tmp_path / "pair")) == 2
        assert said in " ".join(capsys.readouterr().err.split())
