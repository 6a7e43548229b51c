"""The same prompts over Ray: equal output, also where an actor is killed; the shares that actors get of a cluster."""

from __future__ import annotations

import json
import os
import signal
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from outrider.audio import read_wav
from outrider.audit.sources import own_texts
from outrider.audit.spread import spread_texts
from outrider.batch.jobs import Job
from outrider.batch.ray_pool import Cluster, RayPool, Share, share_of, threads_of
from outrider.batch.run import run_here
from outrider.batch.setup import Setup
from outrider.cli.main import run
from outrider.errors import ModelError, ParameterError
from outrider.models.loading import load
from outrider.request.from_specs import make_named
from outrider.request.prompts import encode
from outrider.sampling import SamplingSettings
from outrider.tune import writing
from tests.helpers.encoder_decoder import tone, write_wav
from tests.helpers.folders import save_encoder_decoder

pytest.importorskip("ray")
# Ray's own modules and its sockets at the end of a process
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DEFAULTS = {"seed": 3, "temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True}
COUNT = 40
TABLE = {"seconds": {"1": 1.0, "9": 1.2}, "per_token": {}, "context": 64}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster for the tests that leave it alive: joining one takes a second, starting one many."""
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield nodes.address
    nodes.shutdown()


def jobs(taken: list[int] | None = None) -> Iterator[Job]:
    for i in range(COUNT):
        if taken is not None:
            taken.append(i)
        yield Job(i, f"the quick brown {i}" if i != 7 else "a b " * 400, {"max_new_tokens": 5 + 40 * (i % 4 == 1)})


def setup_of(target: Path, draft: Path) -> Setup:
    return Setup(target=str(target), draft=(str(draft),), batch_size=2, dtype="float64", device="cpu", defaults=DEFAULTS)


def tokens_of(records: list[dict[str, Any]]) -> dict[int, Any]:
    found = {one["index"]: (one.get("tokens"), one.get("text"), one.get("error")) for one in records}
    assert len(found) == len(records)
    return found


def process_of(pool: RayPool) -> int:
    """The first actor's."""
    import ray

    return int(ray.get(pool._actors[0].handle.__ray_call__.remote(lambda worker: os.getpid())))


@pytest.mark.slow
def test_two_actors_one_of_them_killed_give_what_one_process_gives(
    target_folder: Path, draft_folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The draft lengths are adapted, and follow from the tables of the run."""
    setup = setup_of(target_folder, draft_folder)
    costs = {f"{folder} float64": TABLE for folder in (target_folder, draft_folder)}
    tables = {"target": f"{target_folder} float64", "costs": costs}
    want = tokens_of(list(run_here(setup, jobs(), tables, lambda found: None)))
    assert sum(text is None for _, text, _ in want.values()) == 1

    pool = RayPool(Cluster(None, 2))
    got: list[Any] = []
    taken: list[int] = []
    kept: list[Any] = []
    records = pool(setup, jobs(taken), tables, kept.append)
    for record in records:
        got.append(record)
        assert len(taken) <= len(got) + 2 * (2 + 1) + 2 * (2 + 1)  # what two actors hold, and what is on its way back
        if len(got) == 9:
            os.kill(process_of(pool), signal.SIGKILL)
    assert caplog.text.count("a Ray actor died") == 1
    assert capsys.readouterr().out == ""  # though Ray tells of the death there
    assert tokens_of(got) == want
    assert kept == [tables]


@pytest.mark.slow
def test_the_end_of_the_cluster_ends_the_run_with_the_reason(
    target_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray goes on asking for a place for new actors, and waits for ever."""
    for name, value in {"initial_delay_ms": "100", "period_ms": "300", "failure_threshold": "3"}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", value)  # else it notices after twenty seconds
    endless = (Job(i, "the quick brown", {"max_new_tokens": 20}) for i in count())
    records = RayPool(Cluster(None, 1))(setup_of(target_folder, draft_folder), endless, {}, lambda found: None)
    next(records)
    stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat")]
    (raylet,) = [one for one in stats if "(raylet)" in one and one.rpartition(")")[2].split()[1] == str(os.getpid())]
    os.kill(int(raylet.split()[0]), signal.SIGKILL)
    with pytest.raises(ModelError, match="no machine left that is alive"):
        deque(records, maxlen=0)


@pytest.mark.slow
def test_the_command_goes_on_with_ray_where_one_process_stopped(
    address: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"the fox {i}"}) + "\n" for i in range(12)))
    options = ["--target", str(target_folder), "--dtype", "float64", "--temperature", "1", "--max-new-tokens", "9"]
    command = ["batch", str(source), "-o", str(output), "--batch-size", "2", *options]
    assert run(command) == 0
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:5]) + whole[5][:20])
    assert run([*command, "--ray", address, "--actors", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["before"] == 5
    strip = [{k: v for k, v in json.loads(line).items() if k != "stats"} for line in whole]
    again = [{k: v for k, v in json.loads(line).items() if k != "stats"} for line in output.read_text().splitlines()]
    assert sorted(again, key=lambda one: one["index"]) == sorted(strip, key=lambda one: one["index"])


@pytest.mark.slow
def test_audited_texts_are_those_of_one_process_in_the_same_order(address: str, target_folder: Path) -> None:
    sampling, draft = SamplingSettings(temperature=1.0, top_p=0.9), "self:temperature=1.5"
    target = load(target_folder, dtype="float64")
    setup = Setup(str(target_folder), (draft,), 3, batch_size=8, dtype="float64", device="cpu", rounds=True)
    got = list(spread_texts(Cluster(address, 1), setup, target, sampling, 400, seed=5, done=8))
    want = list(own_texts(target, make_named(draft, target), sampling, 400, 3, seed=5, done=8))
    assert [one.tokens for one in got] == [one.tokens for one in want]
    counts = [[[(len(r.tokens), r.drafted, r.accepted) for r in one.rounds] for one in texts] for texts in (got, want)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_encoder_decoders_are_audited_and_tuned_on_the_texts_of_one_process(
    address: str, tmp_path: Path, cache: Path
) -> None:
    """Recordings travel; answers to a source may end in tuning, and not in audits."""
    sampling, draft = SamplingSettings(temperature=1.0, top_p=0.9), "self:temperature=1.5"
    folder = save_encoder_decoder(tmp_path / "whisper", "Whisper")
    target = load(folder, dtype="float64")
    sounds = [read_wav(write_wav(tmp_path / f"{i}.wav", tone(0.3 + 0.1 * i))) for i in range(2)]
    setup = Setup(str(folder), (draft,), 3, batch_size=8, dtype="float64", device="cpu", rounds=True)
    got = list(spread_texts(Cluster(address, 1), setup, target, sampling, 60, 5, 0, sounds))
    want = list(own_texts(target, make_named(draft, target), sampling, 60, 3, sounds, 5))
    assert [(one.tokens, one.prompt_length, one.heard) for one in got] == [
        (one.tokens, one.prompt_length, one.heard) for one in want
    ]
    assert sum(len(one.new) for one in got) >= 60

    folder = save_encoder_decoder(tmp_path / "t5", "T5")
    target = load(folder, dtype="float64")
    setup = Setup(str(folder), dtype="float64", device="cpu")
    sources = [encode(target, text) for text in ("the fox", "def f(x): return x", "0123")]
    tuned = list(writing.spread_texts(target, Cluster(address, 1), setup, sources, sampling, 24, 14))
    assert tuned == list(writing.own_texts(target, sources, sampling, 24, 14))
    assert any(len(tokens) < 24 for tokens in tuned)


@pytest.mark.slow
def test_tasks_are_answered_as_by_one_process(
    address: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "asked.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"the fox {i}"}) + "\n" for i in range(3)))
    models = ["--target", str(target_folder), "--dtype", "float64", "--draft", "suffix", "--num-draft-tokens", "2"]
    command = ["bench", "tasks", "--task", f"jsonl:{source}", "--temperature", "1", "--max-new-tokens", "8", *models]
    logs = [tmp_path / "here.jsonl", tmp_path / "ray.jsonl"]
    for log, options in zip(logs, ([], ["--ray", address, "--actors", "1"]), strict=True):
        assert run([*command, "--metric", "none", "--log", str(log), "--json", *options]) == 0
    answers: list[dict[Any, Any]] = [{}, {}]
    for log, found in zip(logs, answers, strict=True):
        for line in log.read_text().splitlines()[1:]:
            one = json.loads(line)
            found[one["example"], one["drafting"]] = (one["tokens"], one["text"], one["rounds"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6


@pytest.mark.slow
def test_drafts_are_tuned_on_the_texts_of_one_process(
    address: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("the fox\nthe dog\na fox\n")
    command = ["tune", str(target_folder), "--dtype", "float64", "--prompts", str(prompts), "--max-new-tokens", "40"]
    found = []
    for options in ([], ["--ray", address, "--actors", "1"]):
        assert run([*command, "--temperature", "1", "--top-p", "0.9", "--seed", "3", "--json", *options]) == 0
        candidates = json.loads(capsys.readouterr().out)["candidates"]
        found.append([(one["name"], one["alpha"], one["coverage"]) for one in candidates])
    assert found[0] == found[1]
    assert all(0 < alpha < 1 for _, alpha, _ in found[0])


@pytest.mark.slow
def test_errors_of_an_actor_are_one_line_here(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    command = ["batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--ray", address, "--actors", "1"]
    assert run([*command, "--target", str(tmp_path / "nowhere")]) == 1
    joining, *said = capsys.readouterr().err.splitlines()
    assert joining == f"outrider: joining the Ray cluster at {address} …"
    assert len(said) == 1
    assert "nowhere" in said[0]


def test_actors_share_what_the_cluster_has() -> None:
    assert share_of(Cluster(), "auto", {"CPU": 16}, 2) == Share(2, 8, 0)
    assert share_of(Cluster(None, 3), "cpu", {"CPU": 16, "GPU": 4}, 2) == Share(3, 5, 0)
    assert share_of(Cluster(), "auto", {"CPU": 16, "GPU": 4}, 2) == Share(4, 1, 1)
    for cluster, device, resources in ((Cluster(None, 5), "auto", {"GPU": 4}), (Cluster(None, 9), "cpu", {"CPU": 8})):
        with pytest.raises(ParameterError, match="actors must be in 1 …"):
            share_of(cluster, device, resources, 1)
    with pytest.raises(ParameterError, match="no GPU"):
        share_of(Cluster(), "cuda", {"CPU": 8}, 1)


def test_an_actor_has_no_more_threads_than_this_process_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [threads_of(Share(1, cpus, 0)) for cpus in (0, 1, 8)] == [1, 1, 2]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_of(Share(1, 8, 0)) == 8


def test_actors_without_ray_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--actors", "2"]) == 2
    assert "--actors belongs to --ray" in capsys.readouterr().err
