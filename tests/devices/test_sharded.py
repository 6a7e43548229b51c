"""Several ranks give what one process gives, agree whatever one of them computes, and end together.

Each fixture starts one job of torchrun over gloo and runs several cases in it, since starting one takes seconds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.audit.greedy import first_divergence
from outrider.audit.planted import FAULTS
from outrider.audit.uniformity import DOUBT
from outrider.audit.verdict import NOT_EXACT
from outrider.cli.main import run
from outrider.errors import ParameterError
from outrider.generation import generate
from outrider.request.prompts import encode
from outrider.sharded import lead
from outrider.sharded.costs import Shape, communication_seconds, pass_seconds
from outrider.sharded.loading import heads_divide, plan_of
from outrider.theory.links import Link, ring_link
from tests.helpers.folders import make_tokenizer, save_model, share_cache
from tests.helpers.real_models import smollm2
from tests.helpers.tiny_models import module

# With norms of single heads; a scaled table; fused layers; experts: what keeps transformers' own hooks.
OTHERS = ("Qwen3", "Gemma2", "Phi3", "Mixtral")
ROOT = Path(__file__).parents[2]
PROMPT = "Write a haiku about autumn."


def start(ranks: int, *arguments: str, cache: Path | None = None) -> subprocess.Popen[str]:
    """A job of torchrun on this machine, with the user's cache folder or one of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    given = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if cache is not None:
        given["OUTRIDER_CACHE"] = str(cache)
    return subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    """Have torchrun end its ranks: killed, it would leave them at work."""
    process.terminate()
    process.wait()


def job(ranks: int, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], int, str]:
    """Run cases of `sharded_job` to their end. → what they found, torchrun's exit code, standard error"""
    out = folder / "found.json"
    cache = folder / "cache"
    process = start(ranks, "-m", "tests.helpers.sharded_job", json.dumps({**settings, "out": str(out)}), cache=cache)
    try:
        _, errors = process.communicate(timeout=300)
    finally:
        end(process)
    return json.loads(out.read_text()) if out.exists() else {}, process.returncode, errors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of several architectures, one without a plan, and a draft that often agrees with the first."""
    base = tmp_path_factory.mktemp("sharded")
    made = {name: str(save_model(base / name, 0, architecture=name)) for name in ("Llama", "GPTNeoX", "GPT2", *OTHERS)}
    tokenizer = make_tokenizer()
    near = module("Llama", 0, torch.float32, vocab_size=len(tokenizer), max_position_embeddings=256)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.03)
    near.save_pretrained(base / "near")
    tokenizer.save_pretrained(base / "near")
    return {**made, "near": str(base / "near")}


@pytest.fixture(scope="module")
def two(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two ranks: tokens, laws, what was planted on rank 1, refusals."""
    folder = tmp_path_factory.mktemp("two")
    share_cache(folder / "cache", tmp_path_factory)
    pair = {"target": folders["Llama"], "draft": folders["near"]}
    flags = {what: str(folder / what) for what in ("logits", "sums")}
    cases = {
        "greedy:Llama": pair,
        "greedy:GPTNeoX": {"target": folders["GPTNeoX"], "draft": folders["near"]},
        "greedy:logits": {**pair, "flag": flags["logits"]},
        "greedy:sums": {**pair, "flag": flags["sums"]},
        "audit": {**pair, "tokens": 1100},
        "architectures": {"folders": {name: folders[name] for name in OTHERS}},
        "refusals": {"target": folders["Llama"], "no_plan": folders["GPT2"]},
        "automatic": {"target": folders["Llama"], "draft": folders["near"], "no_plan": folders["GPT2"]},
    }
    plants = [(what, 1, flag) for what, flag in flags.items()]
    found, code, errors = job(2, {"cases": cases, "plant": plants}, folder)
    assert code == 0, errors
    return {**found, "errors": errors}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX"])
def test_two_ranks_give_the_tokens_of_one_in_every_placement(two: dict[str, Any], architecture: str) -> None:
    found = two[f"greedy:{architecture}"]
    assert found["off"] < 1e-5
    assert found["differs"] == {"plain": [], "rank0": [], "replicated": [], "sharded": []}
    layers = 2
    assert found["sums"] == 2 * layers + (architecture == "Llama")  # its table is cut, too


@pytest.mark.slow
def test_every_placement_drafts_what_is_accepted(two: dict[str, Any]) -> None:
    accepted = set(two["greedy:Llama"]["accepted"].values())
    assert len(accepted) == 1
    assert accepted.pop() > 4


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["logits", "sums"])
def test_what_another_rank_computes_differently_changes_nothing(two: dict[str, Any], planted: str) -> None:
    """Rank 1 returns negated logits, or its sums differ in their last bits throughout."""
    found = two[f"greedy:{planted}"]
    assert found["off"] < 1e-5
    assert found["differs"] == {"plain": [], "rank0": [], "replicated": [], "sharded": []}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rank0", "replicated", "sharded"])
def test_sampled_texts_follow_the_law_of_one_process(two: dict[str, Any], place: str) -> None:
    """The sample would have shown every fault of the acceptance rule but the subtlest two, for which the audit asks 3,000 to
    9,000 tokens, by its seed; and shows none.
    """
    report = two["audit"][place]
    assert report["verdict"] != NOT_EXACT, report
    assert report["p"] > DOUBT, report
    assert 0.3 < report["alpha"] < 0.99
    assert set(report["unseen"]) <= {name for name in FAULTS if name.startswith("noise of")}


@pytest.mark.slow
def test_what_cannot_be_sharded_says_why(two: dict[str, Any]) -> None:
    found = two["refusals"]
    assert "no tensor-parallel plan" in found["no plan"]
    assert "(gpt2)" in found["no plan"]
    assert "floating-point" in found["int8"]
    assert "engine must be transformers" in found["engine"]
    assert "placement must be" in found["placement"]
    assert "/nowhere/at/all" in found["missing"]
    assert "early-exit can't draft" in found["early exit"]


@pytest.mark.slow
def test_other_layers_keep_the_hooks_of_transformers(two: dict[str, Any]) -> None:
    off = two["architectures"]
    assert set(off) == set(OTHERS)
    assert max(off.values()) < 1e-5, off


@pytest.mark.slow
def test_an_automatic_placement_is_measured_and_stays(two: dict[str, Any]) -> None:
    first, without_plan, again = two["automatic"]["places"]
    assert first == again  # the costs are kept
    assert without_plan in ("rank0", "replicated")
    assert two["errors"].count("placed on") == 3


@pytest.fixture(scope="module")
def four(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ranks, one of which is killed after the cases, in the middle of a generation.

    Drafts are sharded like the target alone: where else one may be placed, two ranks show.
    """
    folder = tmp_path_factory.mktemp("four")
    share_cache(folder / "cache", tmp_path_factory)
    marker, out = folder / "started", folder / "found.json"
    cases = {
        "greedy:Llama": {"target": folders["Llama"], "draft": folders["near"], "places": ["sharded"]},
        "greedy:GPTNeoX": {"target": folders["GPTNeoX"], "draft": folders["near"], "places": ["sharded"]},
        "endless": {"target": folders["Llama"], "marker": str(marker)},
    }
    settings = json.dumps({"cases": cases, "out": str(out)})
    process = start(4, "-m", "tests.helpers.sharded_job", settings, cache=folder / "cache")
    try:
        deadline = time.monotonic() + 240
        while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = ranks_of(process.pid)
        os.kill(ranks[2], signal.SIGKILL)
        killed = time.monotonic()
        while any(alive(ranks[rank]) for rank in (0, 1, 3)) and time.monotonic() < killed + 30:
            time.sleep(0.05)
        seconds = time.monotonic() - killed
        _, errors = process.communicate(timeout=60)
    finally:
        end(process)
    return {**json.loads(out.read_text()), "seconds": seconds, "errors": errors, "code": process.returncode}


def ranks_of(parent: int) -> dict[int, int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                values = dict(entry.partition("=")[::2] for entry in (folder / "environ").read_text().split("\0"))
                found[int(values["RANK"])] = int(folder.name)
        except (OSError, KeyError):
            continue
    return found


def alive(process: int) -> bool:
    """Whether it is running; a process that has ended may still be listed."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Llama", "GPTNeoX"])
def test_four_ranks_give_the_tokens_of_one(four: dict[str, Any], architecture: str) -> None:
    """The tiny Llama has 2 heads of keys, so that its attention stays whole; GPT-NeoX has 4."""
    found = four[f"greedy:{architecture}"]
    assert found["off"] < 1e-5
    assert found["differs"] == {"plain": [], "sharded": []}
    assert found["sums"] == (3 if architecture == "Llama" else 4)


@pytest.mark.slow
def test_the_end_of_a_rank_ends_the_job_with_the_reason(four: dict[str, Any]) -> None:
    assert four["seconds"] < 10
    assert four["code"] != 0
    ours = [line for line in four["errors"].splitlines() if line.startswith("outrider: rank")]
    assert ours == ["outrider: rank 2 has ended without a word: it was killed, or crashed"]


@pytest.mark.slow
def test_bad_input_on_one_rank_ends_the_job_with_one_line(folders: dict[str, str], tmp_path: Path) -> None:
    cases = {"endless": {"target": folders["Llama"], "marker": str(tmp_path / "started")}}
    found, code, errors = job(2, {"cases": cases, "bad_rank": 1}, tmp_path)
    assert (found, code) == ({}, 1)
    ours = [line for line in errors.splitlines() if line.startswith("outrider:")]
    assert len(ours) == 1
    assert ours[0].startswith("outrider: rank 1: ")
    assert "/nowhere/at/all" in ours[0]


@pytest.mark.slow
def test_the_command_on_two_ranks_prints_once_what_one_process_writes() -> None:
    """SmolLM2 has 9 heads, which two ranks can't share: its attention stays whole."""
    options = [
        "--tensor-parallel",
        "--dtype",
        "float32",
        "--max-new-tokens",
        "12",
        "--draft",
        "suffix",
        "--profile",
        "--json",
    ]
    process = start(2, "-m", "outrider", "generate", PROMPT, *options, "--num-draft-tokens", "3")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    got = json.loads(out)
    target = smollm2()
    messages = [{"role": "user", "content": PROMPT}]
    wanted = generate(target, messages, draft=None, max_new_tokens=12).tokens
    parted = first_divergence(target, encode(target, messages), wanted, got["tokens"])
    assert got["tokens"] == wanted or (parted is not None and parted.near_tie)
    share = got["tensor_parallel"][0]
    assert (share["ranks"], share["passes"]) == (2, got["stats"]["rounds"])
    assert share["collectives"] == 30 + 1 + 1  # a sum a layer, the cut table, the logits
    assert share["compute"] + share["communication"] == pytest.approx(share["milliseconds"])
    assert share["predicted"] > 0
    assert 0.5 < share["shared_weights"] < 1


def test_outside_a_job_it_says_how_to_start_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert run(["generate", "x", "--tensor-parallel"]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
    with pytest.raises(ParameterError, match="torchrun"):
        lead(lambda team: None)
    assert run(["generate", "x", "--draft-placement", "rank0"]) == 2
    assert "--tensor-parallel" in capsys.readouterr().err
    assert run(["generate", "x", "--tensor-parallel", "--draft-placement", "rank0"]) == 2
    assert "is for a draft model" in capsys.readouterr().err
    assert run(["generate", "x", "--tensor-parallel", "--device", "cpu"]) == 2
    assert "device must be auto" in capsys.readouterr().err


def test_a_job_without_the_option_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, value)
    assert run(["generate", "x"]) == 2
    assert "add --tensor-parallel" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert run(["generate", "x"]) == 2
    assert capsys.readouterr().err == ""  # only rank 0 speaks


def test_attention_stays_whole_where_heads_do_not_divide(folders: dict[str, str]) -> None:
    config = module("Llama").config  # 4 heads, 2 of them of keys
    assert [heads_divide(config, ranks) for ranks in (2, 3, 4)] == [True, False, False]
    plan = plan_of(folders["Llama"], "tiny", 4)
    assert {key: style for key, style in plan.items() if "attn" in key} == {
        f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"
    }
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"


def test_communication_is_sums_times_latency_and_bytes() -> None:
    link = Link(ranks=4, latency=2e-6, bandwidth=1e9, command=1e-6)
    shape = Shape(sums=2 * 10, hidden=1000, gathered=0, value_bytes=2)  # ten layers
    assert communication_seconds(link, shape, 5) == pytest.approx(20 * (2e-6 + 5 * 2000 / 1e9) + 1e-6)
    with_logits = dataclasses.replace(shape, gathered=40000)
    more = communication_seconds(link, with_logits, 5) - communication_seconds(link, shape, 5)
    assert more == pytest.approx(2e-6 + 5 * 80000 * 3 / 4 / 1e9)


def test_a_ring_of_two_passes_each_byte_once() -> None:
    two, many = ring_link(2, 1e-6, 1e10), ring_link(64, 1e-6, 1e10)
    assert two.sum_seconds(1e10) == pytest.approx(1 + 2e-6)
    assert many.sum_seconds(1e10) == pytest.approx(2 * 63 / 64 + 126e-6)


def test_a_pass_is_predicted_from_the_share_that_is_cut() -> None:
    assert pass_seconds(1.0, 0.0, 4, 0.25) == pytest.approx(1.25)
    assert pass_seconds(1.0, 0.5, 2, 0.25, fixed=0.4, company=1.2) == pytest.approx(0.4 + 0.6 * 1.2 * 0.75 + 0.25)
    assert pass_seconds(1.0, 1.0, 4, 0.25) == pytest.approx(0.5)
