"""n-gram tables: counts against brute force, true probabilities, the file, drafting, the command."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.progress import Progress
from torch import Tensor

import outrider.ngram.training as training
from outrider.cli.main import run as run_cli
from outrider.cli.train_ngram import _pieces
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import NgramDrafter, SpeculativeDrafter
from outrider.errors import ModelError, ParameterError, VocabularyMismatchError
from outrider.models.table import TableModel
from outrider.ngram.table import context_hash, context_hashes, read_table
from outrider.randomness import RandomStream
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.helpers.marks import thinned
from tests.helpers.ngrams import SIZE, corpus, trained
from tests.helpers.samples import ALARM, V, p_value, run
from tests.helpers.toys import SETTINGS, table


def brute_force(documents: list[list[int]], order: int, min_count: int, followers: int, context: list[int]) -> np.ndarray:
    counts = Counter(token for doc in documents for token in doc)
    law = np.array([counts[t] + 0.5 for t in range(SIZE)])
    law /= law.sum()
    for length in range(1, order):
        after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for doc in documents:
            for i in range(len(doc) - length):
                after[tuple(doc[i : i + length])][doc[i + length]] += 1
        seen = after.get(tuple(context[-length:]))
        kept = sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:followers] if seen else []
        kept = [(t, c) for t, c in kept if length == 1 or c >= min_count]
        if seen is None or not kept:
            break
        shares = {t: c / (sum(seen.values()) + len(seen)) for t, c in kept}
        law = law * (1 - sum(shares.values()))
        for token, share in shares.items():
            law[token] += share
    return law


@pytest.mark.parametrize(("order", "min_count", "followers"), [(1, 1, 9), (2, 1, 32), (4, 2, 3), (5, 1, 32)])
@pytest.mark.parametrize("chunk", [10**6, 300])
def test_laws_are_those_of_the_counts(
    order: int, min_count: int, followers: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when counted in chunks and merged in parts. A document cut between chunks loses nothing."""
    monkeypatch.setattr(training, "CHUNK", chunk)
    monkeypatch.setattr(training, "MERGED", 100 if chunk < 1000 else 10**6)
    documents = corpus()
    found = trained(tmp_path / "t", documents, order=order, min_count=min_count, followers=followers)
    assert found.order == order
    chance = random.Random(1)
    for _ in range(60):
        context = [chance.randrange(SIZE) for _ in range(2)] if chance.random() < 0.2 else chance.choice(documents)[:150]
        law = found.law(context)
        assert law.sum() == pytest.approx(1.0, abs=1e-12)
        assert law.min() > 0
        np.testing.assert_allclose(law, brute_force(documents, order, min_count, followers, context), atol=1e-12)


def test_the_best_guess_is_the_most_frequent_follower_of_the_longest_context(tmp_path: Path) -> None:
    found = trained(tmp_path / "t", [[1, 2, 3, 1, 2, 3, 1, 2, 4, 9, 2, 5, 9, 2, 5]], order=3, min_count=1)
    assert found.best([1, 2]) == 3
    assert found.best([9, 2]) == 5
    assert found.best([7, 2]) == 3 or found.best([7, 2]) == 5
    assert found.best([8, 8]) == 2  # the most frequent token
    assert [found.depth(c) for c in ([1, 2], [7, 2], [7, 7], [])] == [2, 1, 0, 0]


@pytest.mark.parametrize("name", thinned(["temperature 1", "greedy", "top-p", "penalties", "all"]))
def test_ngram_drafts_follow_the_targets_law(name: str, tmp_path: Path) -> None:
    drafter = NgramDrafter(trained(tmp_path / "t", corpus(size=V), size=V, order=3, min_count=1))
    target = table(1, V)
    tokens, rounds = run(target, drafter, SETTINGS[name], FixedLength(3), samples=2000)
    assert p_value(tokens, target, SETTINGS[name]) > ALARM
    assert sum(record.drafted for record in rounds) > 1000


@pytest.mark.parametrize("name", ["greedy", "temperature 1"])
def test_a_model_that_a_table_drafts_for_follows_the_targets_law(name: str, tmp_path: Path) -> None:
    """Model ← n-gram: the table's rounds inside, the model's outside."""
    inner = NgramDrafter(trained(tmp_path / "t", corpus(size=V), size=V, order=3, min_count=1))
    drafter = SpeculativeDrafter(table(2, V), inner, FixedLength(2), step_seconds=0.2)
    tokens, rounds = run(table(1, V), drafter, SETTINGS[name], FixedLength(3), samples=2000)
    assert p_value(tokens, table(1, V), SETTINGS[name]) > ALARM
    assert sum(record.drafted for record in rounds) > 1000


def test_a_table_of_the_targets_own_text_is_accepted_as_sum_min_says(tmp_path: Path) -> None:
    """A bigram drafts for a bigram model: alpha is measured against sum min of the two laws, and high."""
    target = TableModel(table(3, V)._probs[0])
    own = decode(target, [Request([0], 3000, RandomStream(1))], SETTINGS["temperature 1"])[0]
    drafter = NgramDrafter(trained(tmp_path / "t", own, size=V, order=2))
    from outrider.round import Extras

    requests = [Request([0], 300, RandomStream(2, i)) for i in range(10)]
    _, rounds = decode(target, requests, SETTINGS["temperature 1"], drafter, FixedLength(3), Extras(betas=True))
    records = [record for row in rounds for record in row]
    betas = [b for r in records if r.betas for b in r.betas[: r.tested]]
    accepted = sum(r.accepted for r in records)
    assert accepted / len(betas) > 0.9
    assert abs(accepted - sum(betas)) < 6 * (sum(b * (1 - b) for b in betas) ** 0.5 + 1)


def test_an_order_that_the_table_does_not_hold_is_refused(tmp_path: Path) -> None:
    found = trained(tmp_path / "t", corpus(), order=3)
    assert [NgramDrafter(found, order).name for order in (None, 1, 3)] == ["3-gram", "1-gram", "3-gram"]
    assert NgramDrafter(tmp_path / "t").name == "3-gram (t)"  # so that several can be offered at each point
    for order in (0, 4):
        with pytest.raises(ParameterError, match=f"order must be a whole number in 1 … 3, got {order}"):
            NgramDrafter(found, order)


def test_the_file_is_checked(tmp_path: Path) -> None:
    good = tmp_path / "t"
    trained(good, corpus(), order=3)
    assert not [file for file in tmp_path.iterdir() if file != good]  # nothing is left beside it
    data = good.read_bytes()
    for name, content in {"short": data[: len(data) // 2], "other": b"hello\n" + data, "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match="damaged or of another version"):
            read_table(tmp_path / name)
    with pytest.raises(ModelError, match="can't be read"):
        read_table(tmp_path / "missing")
    with pytest.raises(VocabularyMismatchError, match="counted with another tokenizer than that of table-1"):
        decode(table(1, V), [Request([0], 3, RandomStream(0))], SamplingSettings(), NgramDrafter(good), FixedLength(1))
    with pytest.raises(ParameterError, match=r"order must be a whole number in 1 … 8, got 9"):
        training.Settings(order=9)
    with pytest.raises(ParameterError, match="corpus must hold some text"):
        trained(tmp_path / "none", [])


def test_the_command_trains_what_generate_uses(
    tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (texts / "b.txt").write_bytes(b"the quick brown fox\n" * 50 + b"\xff\xfe broken")
    output = tmp_path / "fox.ngram"
    assert run_cli(["train-ngram", str(texts), "--target", str(target_folder), "-o", str(output), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["files"] == 2
    assert about["tokens"] > 2000
    arguments = ["generate", "the quick", "--raw", "--target", str(target_folder), "--max-new-tokens", "8", "--json"]
    assert run_cli([*arguments, "--draft", f"ngram:table={output}", "--num-draft-tokens", "3"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["stats"]["drafted"] > 0
    assert run_cli([*arguments, "--plain"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == got["tokens"]
    (texts / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (texts / "picture").write_bytes(np.random.default_rng(0).integers(1, 256, 4000).astype(np.uint8).tobytes())
    assert run_cli(["train-ngram", str(texts), "--target", str(target_folder), "-o", str(output), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == about["tokens"]
    assert "passed over 2 files that hold no text" in said.err
    assert run_cli(["train-ngram", str(texts / "picture"), "--target", str(target_folder), "-o", str(output)]) != 0
    assert "must be text" in capsys.readouterr().err
    assert run_cli(["train-ngram", str(tmp_path / "missing"), "-o", str(output)]) != 0
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["one line of words " * 9, "word" * 40, "short\n" * 30, "a b\nc" + "d" * 50 + " e\n"])
def test_a_file_of_any_kind_of_lines_is_read_in_small_pieces(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is one long line was read and tokenised whole."""
    monkeypatch.setattr("outrider.cli.train_ngram.PIECE", 16)
    monkeypatch.setattr("outrider.cli.train_ngram.LONGEST_WORD", 32)
    (tmp_path / "text").write_text(text)
    progress = Progress()
    task = progress.add_task("reading", total=len(text))
    pieces = list(_pieces(tmp_path / "text", progress, task))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 48
    assert progress.tasks[0].completed == len(text)
    longest = max(map(len, text.split()))  # one that is longer than any word is cut where it is
    assert longest > 32 or all(before.endswith("\n") or after[0] == " " for before, after in pairwise(pieces))


def test_one_context_hashes_as_all_of_them_do() -> None:
    tokens = np.random.default_rng(0).integers(0, 200_000, 60)
    for length in (1, 2, 3, 7):
        every = context_hashes(tokens, length)
        windows = [tokens[i : i + length] for i in range(len(every))]
        kinds: list[Any] = [np.ndarray.tolist, list, torch.from_numpy]
        for kind in kinds:  # tokens need not be Python's own numbers
            assert [context_hash(kind(window)) for window in windows] == every.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_ends_where_its_table_has_no_law_left(temperature: float, tmp_path: Path) -> None:
    """Behind such a place nothing would be known, and processors would be shown what the table never drew."""
    drafter = NgramDrafter(trained(tmp_path / "t", corpus(size=V), size=V, order=3, min_count=1))
    seen: set[tuple[int, ...]] = set()

    def nothing_behind(tokens: Tensor, scores: Tensor) -> Tensor:
        """Excludes everything behind two new tokens, but for the target itself, whose laws are in float64."""
        if scores.dtype == torch.float32 and tokens.shape[1] > 3:
            seen.add(tuple(tokens[0].tolist()))
            return torch.full_like(scores, -torch.inf)
        return scores

    law = SamplingSettings(temperature=temperature, processors=(nothing_behind,))
    requests = [Request([0, 1], 8, RandomStream(i)) for i in range(20)]
    _, rounds = decode(table(1, V), requests, law, drafter, FixedLength(3), Extras(drafts=True))
    first = [row[0].drafts for row in rounds]
    assert all(len(drafts or ()) < 3 for drafts in first)
    assert any(len(drafts or ()) == 2 for drafts in first)
    assert seen
