"""Runs of `outrider train`: they end together, go on only as they were, and say what they made under a name that works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scipy import stats

import outrider
from outrider.cli.train.made import as_head, as_model
from outrider.errors import ModelError, ParameterError
from outrider.heads.config import load_head
from outrider.heads.target_parts import output_rows
from outrider.models.cut_head import DRAFT_TOKENS
from outrider.models.loading import load_transformers
from outrider.models.transformers_model import TransformersModel
from outrider.request.draft_specs import is_named
from outrider.sharded.loading import _sharded
from tests.helpers.commands import call
from tests.helpers.folders import save_model
from tests.helpers.train_runs import LINES, options, refusal

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_several_processes_stop_together_by_the_clock(target_folder: Path, data: Path, tmp_path: Path, cache: Path) -> None:
    """The first one's time is over at once, the second one's never: both stop after the first step."""
    out = tmp_path / "head"
    arguments = options("head", target_folder, data, "-o", out, "--vocabulary", 100, "--hours", 1e-9, "--steps", 500)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tests.helpers.train_job",
    ]
    given = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "OUTRIDER_CACHE": str(cache)}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    process = subprocess.Popen(
        [*launcher, *arguments],
        cwd=ROOT,
        env={**os.environ, **given, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=120)
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait()
    assert process.returncode == 0, errors[-2000:]
    made = json.loads(printed)
    assert (made["steps"], made["finished"]) == (1, False)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_run_goes_on_only_as_it_was(
    target_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = options("head", target_folder, data, "-o", tmp_path / "head", "--vocabulary", 100)
    assert "resume needs a checkpoint, and none is in" in refusal(capsys, [*shared, "--resume"])
    made = call(capsys, *shared, "--hours", "1e-9")
    assert made["match_is_lower_bound"]
    assert "a lower bound" in (tmp_path / "head" / "README.md").read_text()
    for other, differs in (
        (["--loss", "kl"], "loss: 'mix' there, 'kl' here"),
        (["--seed", "7"], "seed: 0 there, 7 here"),
        (["--learning-rate", "0.1"], "learning_rate: 0.0005 there, 0.1 here"),
        (["--vocabulary", "50"], "vocabulary: 100 there, 50 here"),
        (["--held-out", f"code={Path(__file__)}"], "held out: 'of the data' there, 'given' here"),
    ):
        assert differs in refusal(capsys, [*shared, "--resume", *other])
    whole, before = data.read_text(), data.stat()
    data.write_text(whole + "\n" + json.dumps({"text": "more " * 30}))
    assert "(version of the data: " in refusal(capsys, [*shared, "--resume"])
    data.write_text(whole)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    settings = tmp_path / "head" / "checkpoints" / "settings.json"
    kept = settings.read_text()
    settings.unlink()
    assert "settings.json is missing there" in refusal(capsys, [*shared, "--resume"])
    settings.write_text(kept)
    whole_run = call(capsys, *shared, "--resume", "--steps", "3")
    assert (whole_run["steps"], whole_run["finished"]) == (3, True)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_start_keeps_its_own_shape(
    target_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the card of blockwise heads predicts no more than they have."""
    first = options("blocks", target_folder, data, "-o", tmp_path / "first", "--blocks", 2, "--vocabulary", 90)
    assert all(one["length"] <= 2 for one in call(capsys, *first)["predicted"].values())
    again = options("blocks", target_folder, data, "-o", tmp_path / "again", "--start", tmp_path / "first")
    assert "start has its own shape: leave out --blocks" in refusal(capsys, [*again, "--blocks", "2"])
    assert call(capsys, *again)["what"] == "2 blockwise heads over 90 tokens"
    assert f"seed 0; begun from {tmp_path / 'first'}, an earlier run." in (tmp_path / "again" / "README.md").read_text()
    assert "for all 2 drafted tokens" in (tmp_path / "again" / "README.md").read_text()
    head = options("head", target_folder, data, "-o", tmp_path / "head", "--start", tmp_path / "first", "--window", 9)
    assert "leave out --window" in refusal(capsys, head)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_head_goes_on_with_its_layers_and_another_vocabulary(
    target_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = options("head", target_folder, data, "-o", tmp_path / "first", "--vocabulary", 90, "--state-layers", "1")
    assert call(capsys, *first)["what"] == "An autoregressive head over 90 tokens"
    again = options("head", target_folder, data, "-o", tmp_path / "again", "--start", tmp_path / "first")
    assert call(capsys, *again, "--vocabulary", 120)["what"] == "An autoregressive head over 120 tokens"
    (config, tokens, weights), (before, fewer, _) = (load_head(tmp_path / name) for name in ("again", "first"))
    assert (config.layers, config.num_tokens, before.num_tokens) == ((1,), 120, 90)
    assert set(fewer.tolist()) < set(tokens.tolist())
    assert weights["mix.join.weight"].shape[1] == 3 * config.width
    generate = ["generate", "the quick", "--target", target_folder, "--max-new-tokens", 8, "--temperature", 0, "--json"]
    plain = call(capsys, *generate)["tokens"]
    assert call(capsys, *generate, "--draft", f"head:path={tmp_path / 'again'}")["tokens"] == plain
    for text in ("0", "2", "1,1"):
        wrong = options("head", target_folder, data, "-o", tmp_path / "wrong", "--state-layers", text)
        assert "layers must be" in refusal(capsys, wrong)
    assert not (tmp_path / "wrong" / "states").exists()  # before a single state was computed
    assert "state-layers must be numbers" in refusal(capsys, [*wrong[:-1], "x"])
    path = tmp_path / "first" / "config.json"
    for layers, said in ([1.0], "different ones from 1 on"), ([], "can't be used"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "layers": layers}))
        damaged = options("head", target_folder, data, "-o", tmp_path / "bad", "--start", path.parent)
        assert said in refusal(capsys, damaged, code=1)
    other = options("blocks", target_folder, data, "-o", tmp_path / "kind", "--start", tmp_path / "again")
    assert "start must be a head of the same kind" in refusal(capsys, other)
    assert not (tmp_path / "kind").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_student_is_used_by_its_path(
    target_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its folder is called as a drafter is."""
    monkeypatch.chdir(tmp_path)
    made = call(capsys, *options("student", target_folder, data, "-o", "random", "--layers", 1))
    assert made["use"] == "./random"
    assert not made["match_is_lower_bound"]
    assert made["step_seconds"] > 0.0  # the random drafter's is 0
    assert "a lower bound" not in (tmp_path / "random" / "README.md").read_text()
    generate = ["generate", "the quick", "--target", str(target_folder), "--max-new-tokens", "4", "--json"]
    assert len(call(capsys, *generate, "--draft", made["use"])["tokens"]) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_student_of_a_target_with_tied_embeddings_is_kept_and_goes_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_model(tmp_path / "tied", 0, tie_word_embeddings=True)
    out = tmp_path / "student"
    settings = options("student", target, data, "-o", out, "--layers", 1)
    assert call(capsys, *settings)["steps"] == 2
    assert sorted(path.name for path in (out / "checkpoints").glob("checkpoint-*"))[-1] == "checkpoint-2"
    made = call(capsys, *settings, "--steps", 4, "--resume")
    assert made["steps"] == 4
    student = outrider.load(out)
    drafted = outrider.generate(outrider.load(target), "the quick", draft=student, num_draft_tokens=2, max_new_tokens=6)
    assert drafted.stats.drafted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_student_of_few_tokens_drafts_no_others_and_keeps_the_law(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = save_model(tmp_path / "tied", 0, tie_word_embeddings=True), tmp_path / "student"
    made = call(capsys, *options("student", target, data, "-o", out, "--layers", 1, "--vocabulary", 20))
    tokens = json.loads((out / "config.json").read_text())[DRAFT_TOKENS]
    assert len(tokens) == 20
    assert made["match_is_lower_bound"]
    assert made["what"].endswith("over 20 tokens")
    whole = transformers.AutoModelForCausalLM.from_pretrained(out).eval()  # an ordinary model to anybody else
    prompt = [5, 9, 2, 7]
    with torch.inference_mode():
        everything = whole(torch.tensor([prompt])).logits[0, -1]
    student, plain = outrider.load(out, dtype="float32"), outrider.load(target, dtype="float32")
    sequence = student.open()
    found = student.score([sequence], torch.tensor([prompt]), [len(prompt)], "last")
    assert found is not None
    others = sorted(set(range(student.vocab_size)) - set(tokens))
    torch.testing.assert_close(found[0, -1, tokens], everything[tokens], atol=1e-4, rtol=1e-4)
    assert bool(torch.isneginf(found[0, -1, others]).all())
    sequence.close()
    settings: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    drafted = outrider.generate(plain, prompt, draft=student, num_draft_tokens=3, **settings)
    assert drafted.tokens == outrider.generate(plain, prompt, draft=None, **settings).tokens
    assert _p_value(plain, student, prompt) > 1e-6


def _p_value(target: Any, draft: Any, prompt: list[int], samples: int = 3000) -> float:
    """Chi-square of the first three tokens, drawn among the three likeliest, against the target's own law."""
    settings: dict[str, Any] = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 3, "ignore_eos": True}
    results = outrider.generate(target, [prompt] * samples, draft=draft, num_draft_tokens=2, seed=4, **settings)
    counts = Counter(tuple(result.tokens) for result in results)
    assert sum(result.stats.drafted for result in results) > samples
    expected: dict[tuple[int, ...], float] = {(): float(samples)}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in expected.items():
            with torch.inference_mode():
                best = target.module(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double().topk(3)
            law = zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True)
            longer |= {(*tokens, token): mass * chance for token, chance in law}
        expected = longer
    assert set(counts) <= set(expected)
    return float(stats.chisquare([counts[key] for key in expected], list(expected.values())).pvalue)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_what_a_student_of_few_tokens_can_not_do_is_refused(
    data: Path, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "student"
    call(capsys, *options("student", target_folder, data, "-o", out, "--layers", 1, "--vocabulary", 20))
    with pytest.raises(ParameterError, match="which drafts 20 tokens: leave it out"):
        outrider.load(out, num_tokens=10)
    with pytest.raises(ModelError, match="engine=transformers"):
        outrider.load(out, engine="openvino")
    student = load_transformers(out, pack=False, dtype="float64")
    with pytest.raises(ModelError, match="head was cut has no rows for some tokens"):
        output_rows(student, torch.arange(30))
    with pytest.raises(ParameterError, match="is a draft of 20 tokens and can't be a target"):
        outrider.generate(student, "the quick")
    with pytest.raises(ParameterError, match="is a draft of 20 tokens and can't be a target"):
        outrider.beam_search(student, "the quick", num_beams=2)
    further = options("head", out, data, "-o", tmp_path / "further", "--vocabulary", 20)
    assert "can't be a target" in refusal(capsys, further)
    with pytest.raises(ModelError, match="which can't be sharded: use draft_placement"):
        _sharded(str(out), "it", torch.float32, {})
    anew = TransformersModel(student.module)  # as the drop-in for transformers opens it
    assert anew.draft_tokens is not None
    assert student.draft_tokens is not None
    assert torch.equal(anew.draft_tokens, student.draft_tokens)
    config = json.loads((out / "config.json").read_text())
    for listed in ([3, 2], [3, 3], [1, 3309], [], [0.5], [True], {"a": 1}, [[1]], [-1, 2], ["1"], 7):
        (out / "config.json").write_text(json.dumps({**config, DRAFT_TOKENS: listed}))
        with pytest.raises(ModelError, match="must be token ids in 0 … 329, ascending"):
            outrider.load(out)
    again = options("student", target_folder, data, "-o", tmp_path / "none", "--layers", 1, "--vocabulary", 0)
    assert "vocabulary must be" in refusal(capsys, again)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_students_tokens_are_tokens_and_all_of_them_are_no_cut(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_model(tmp_path / "target", 0)
    generation = {**json.loads((target / "generation_config.json").read_text()), "eos_token_id": [2, 330]}
    (target / "generation_config.json").write_text(json.dumps(generation))
    for asked, listed in ((300, 300), (330, None)):
        out = tmp_path / f"student-{asked}"
        shared = ["--layers", 1, "--cache", tmp_path / "states", "--vocabulary", asked]
        call(capsys, *options("student", target, data, "-o", out, *shared))
        found = json.loads((out / "config.json").read_text()).get(DRAFT_TOKENS)
        assert (None if found is None else len(found)) == listed
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 330]


def test_names_that_can_not_be_drafts_are_refused_at_once(
    target_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_model(Path("self:temperature=1")) == "./self:temperature=1"
    assert not is_named(as_model(Path("suffix")))
    assert as_model(Path("drafts/random")) == "drafts/random"
    assert as_head(Path("random")) == "head:path=random"
    with pytest.raises(ParameterError, match="must have no comma"):
        as_head(Path("a,b"))
    said = refusal(capsys, options("head", target_folder, data, "-o", tmp_path / "a,b"))
    assert "output of a head must have no comma in its name" in said
    assert not (tmp_path / "a,b").exists()


def test_what_can_not_be_held_out_is_said(
    target_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = options("head", target_folder, data, "-o", tmp_path / "head")
    assert "must not share a text" in refusal(capsys, [*shared, "--held-out", f"code={data}"])
    assert "must not share a text" in refusal(capsys, [*shared, "--data", f"{data}@100"])
    inside = options("head", target_folder, tmp_path, "-o", tmp_path / "head")
    assert "output and cache must lie outside the data" in refusal(capsys, inside)
    data.write_text(json.dumps({"text": LINES[0] * 100}))
    assert "hold less than a window of 16 tokens: give --held-out" in refusal(capsys, shared)
