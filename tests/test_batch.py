"""Batches of prompts: a prompt's output depends on the prompt alone, nothing is lost or doubled, memory is bounded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outrider
from outrider.batch import ContinuousBatch, Job, Journal, Setup
from outrider.batch.jobs import check_prompts
from outrider.batch.run import run_here
from outrider.cli.main import run
from outrider.costs import Costs
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, LengthState
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    ModelDrafter,
    NgramDrafter,
    PromptLookupDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
)
from outrider.drafters.base import DraftContext
from outrider.errors import ParameterError
from outrider.models.compatibility import fingerprint
from outrider.models.table import TableModel
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.conftest import make_tokenizer
from tests.test_ngram import trained
from tests.toys import table

SAMPLED = SamplingSettings(temperature=1.0)
COSTS = Costs({1: 1.0, 9: 2.0})
DEFAULTS = {"seed": 3, "temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
PROMPTS = [
    "the quick brown fox",
    "def f(x):",
    "0123456789 012",
    "jumps over",
    "naïve café",
    "the the the",
    "x",
    "dog fox dog",
]


def table_drafter(kind: str) -> Drafter:
    drafter = ModelDrafter(table(1, 5), step_seconds=0.2)
    if kind == "choice":
        return ChoiceDrafter([drafter, PromptLookupDrafter()])
    if kind == "nested":
        return SpeculativeDrafter(table(1, 5), PromptLookupDrafter(), AdaptiveLength(COSTS), step_seconds=0.2)
    return drafter if kind == "model" else SuffixDrafter()


def request(number: int, tokens: int) -> Request:
    return Request([number % 5, 1, number % 3], tokens, RandomStream(7, number))


def alone(number: int, tokens: int, kind: str) -> list[int]:
    found, _ = decode(table(0, 5), [request(number, tokens)], SAMPLED, table_drafter(kind), AdaptiveLength(COSTS))
    return found[0]


def in_company(lengths: list[int], places: int, kind: str, policy: DraftLength) -> dict[int, list[int]]:
    """Rows that join as places become free."""
    decoder = Decoder(table(0, 5), [], SAMPLED, table_drafter(kind), policy)
    waiting = list(enumerate(lengths))
    tokens: dict[int, list[int]] = {}
    while True:
        room = places - len(decoder.rows)
        joining, waiting = waiting[:room], waiting[room:]
        rows = decoder.admit([request(number, length) for number, length in joining])
        assert [row.number for row in rows] == [number for number, _ in joining]
        if not (made := decoder.step()):
            return tokens
        for number, record in made:
            tokens.setdefault(number, []).extend(record.tokens)
        decoder.dismiss()
        assert len(decoder.rows) <= places


@pytest.mark.parametrize("kind", ["model", "choice", "nested", "suffix"])
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6), places=st.integers(1, 4))
def test_a_rows_draws_do_not_depend_on_the_rows_beside_it(kind: str, lengths: list[int], places: int) -> None:
    got = in_company(lengths, places, kind, AdaptiveLength(COSTS))
    assert got == {number: alone(number, length, kind) for number, length in enumerate(lengths)}


class Shared(DraftLength):
    """What must not be: one policy that learns from all rows."""

    def __init__(self) -> None:
        self._state = AdaptiveLength(COSTS).start()

    def start(self) -> LengthState:
        return self._state


def test_a_policy_that_learns_from_all_rows_would_show() -> None:
    lengths = [14, 13, 12, 11, 14, 12]
    assert in_company(lengths, 3, "model", Shared()) != {i: alone(i, n, "model") for i, n in enumerate(lengths)}


def computed(target: Any, setup: Setup, jobs: list[Job], tables: Any = None) -> dict[int, dict[str, Any]]:
    ready = setup.use(target, tables)
    found = {}
    with ContinuousBatch(ready, setup.batch_size) as batch:
        batch.put(jobs)
        while batch.load:
            for record in batch.advance():
                assert record["index"] not in found
                found[record["index"]] = record
    return found


def jobs_of(prompts: list[str]) -> list[Job]:
    return [Job(i, prompt, {"max_new_tokens": 4 + 5 * (i % 3)}) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_batches_of_any_size_and_order_give_what_generate_gives(target_folder: Path, draft_folder: Path, dtype: str) -> None:
    """In float64 to within rounding that no draw here falls into, in int8 to the bit by the engine's promise."""
    target = outrider.load(target_folder, dtype=dtype)
    jobs, draft = jobs_of(PROMPTS), outrider.load(draft_folder, dtype=dtype)
    want = {}
    for i, job in enumerate(jobs):
        options: Any = {**DEFAULTS, **job.options}
        want[i] = outrider.generate(target, PROMPTS, draft=draft, num_draft_tokens=2, **options)[i].tokens
    for size, order in ((1, jobs), (3, jobs), (3, jobs[::-1]), (8, jobs)):
        setup = Setup(draft=(str(draft_folder),), num_draft_tokens=2, batch_size=size, dtype=dtype, defaults=DEFAULTS)
        assert {i: one["tokens"] for i, one in computed(target, setup, order).items()} == want


def test_adapted_lengths_follow_from_the_tables_of_the_run(target_folder: Path, draft_folder: Path) -> None:
    target = outrider.load(target_folder, dtype="float64")
    setup = Setup(draft=(str(draft_folder), "suffix"), batch_size=4, dtype="float64", defaults=DEFAULTS)
    about = {"seconds": {"1": 1.0, "9": 1.1}, "per_token": {}, "context": 64}
    costs = {f"{folder} float64": about for folder in (target_folder, draft_folder)}
    tables = {"target": f"{target_folder} float64", "costs": costs}
    assert json.loads(json.dumps(setup.use(target, tables).tables)) == tables
    first = computed(target, setup, jobs_of(PROMPTS), tables)
    again = computed(target, setup, jobs_of(PROMPTS)[::-1], tables)
    assert {i: one["tokens"] for i, one in first.items()} == {i: one["tokens"] for i, one in again.items()}
    assert sum(one["stats"]["drafted"] for one in first.values()) > 0


def test_a_run_that_began_with_another_target_is_refused(target_folder: Path) -> None:
    tables = {"target": "another bfloat16", "costs": {}}
    with pytest.raises(ParameterError, match="the run began with another bfloat16"):
        Setup(defaults=DEFAULTS).use(outrider.load(target_folder, dtype="float64"), tables)


def test_lines_sample_as_they_say(target_folder: Path) -> None:
    target = outrider.load(target_folder, dtype="float64")
    own: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 2},
        {"repetition_penalty": 1.3},
        {"seed": 11},
        {"temperature": 0.0},
    ]
    jobs = [Job(i, PROMPTS[i], options) for i, options in enumerate(own)]
    found = computed(target, Setup(draft=("suffix",), num_draft_tokens=2, batch_size=3, defaults=DEFAULTS), jobs)
    for i, options in enumerate(own):
        said: Any = {**DEFAULTS, **options}
        if "seed" in options:
            want = outrider.generate(target, PROMPTS[i], draft="suffix", num_draft_tokens=2, **said)
        else:
            want = outrider.generate(target, PROMPTS, draft="suffix", num_draft_tokens=2, **said)[i]
        assert found[i]["tokens"] == want.tokens
        assert found[i]["text"] == want.text


class TextTable(TableModel):
    """A table that speaks: after the token of "x" it has no law."""

    dtype_name = "float64"
    end_tokens: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        size = len(self.tokenizer)
        probs = torch.rand(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (self.poison,) = self.tokenizer.encode("x")
        probs[:, self.poison] = 0.0
        probs = probs / probs.sum(-1, keepdim=True)
        probs[self.poison] = torch.nan
        super().__init__(probs, name="table")


def test_a_prompt_without_a_law_fails_alone() -> None:
    target = TextTable()
    setup = Setup(draft=("prompt-lookup",), num_draft_tokens=2, batch_size=4, defaults=DEFAULTS)
    found = computed(target, setup, jobs_of(PROMPTS))
    assert "no distribution" in found[6]["error"]
    rest = computed(target, setup, [job for job in jobs_of(PROMPTS) if job.index != 6])
    assert {i: one["tokens"] for i, one in found.items() if i != 6} == {i: one["tokens"] for i, one in rest.items()}
    assert len(found) == len(PROMPTS)


def test_what_only_the_model_can_tell_is_an_error_of_its_line(target_folder: Path) -> None:
    target = outrider.load(target_folder, dtype="float64")
    jobs = [Job(0, "a"), Job(1, "a b " * 400), Job(2, [99999]), Job(3, [{"role": "user", "content": "a"}]), Job(4, "b")]
    found = computed(target, Setup(batch_size=2, num_draft_tokens=1, defaults=DEFAULTS), jobs)
    assert "context" in found[1]["error"]
    assert "wrong tokenizer" in found[2]["error"]
    assert "chat template" in found[3]["error"]
    assert len(found[0]["tokens"]) == len(found[4]["tokens"]) == 12


def test_prompts_are_read_only_as_there_is_room(target_folder: Path) -> None:
    taken = 0

    def endless() -> Iterator[Job]:
        nonlocal taken
        while True:
            taken += 1
            yield Job(taken - 1, "the fox", {"max_new_tokens": 1 + taken % 5})

    setup = Setup(target=str(target_folder), draft=(), batch_size=3, dtype="float64", defaults=DEFAULTS)
    records = run_here(setup, endless(), {}, lambda tables: None)
    for done in range(1, 40):
        next(records)
        assert taken <= done + 3 + 1


def test_a_long_file_is_never_held(tmp_path: Path) -> None:
    path, lines = tmp_path / "long.jsonl", 20_000
    path.write_text("".join(json.dumps({"prompt": f"{i} " + "word " * 40}) + "\n" for i in range(lines)))
    tracemalloc.start()
    try:
        prompts = check_prompts(path, DEFAULTS)
        with Journal(tmp_path / "out.jsonl", {}, prompts.count) as journal:
            for job in prompts.jobs():
                journal.append({"index": job.index, "tokens": [1, 2], "text": job.prompt})
        with Journal(tmp_path / "out.jsonl", {}, prompts.count) as journal:
            assert journal.done == lines
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 4_000_000
    assert peak < 400_000


BAD: dict[str, tuple[str | bytes, str]] = {
    "no JSON": ("{", "line 2 must be a JSON object"),
    "a list": ("[1]", "line 2 must be a JSON object"),
    "neither": ("{}", "line 2 must have either prompt or messages"),
    "both": ('{"prompt": "a", "messages": []}', "either prompt or messages"),
    "empty": ('{"prompt": ""}', "prompt must be text or a list of token ids"),
    "half ids": ('{"prompt": [1, "a"]}', "prompt must be text or a list of token ids"),
    "misspelt": ('{"prompt": "a", "temprature": 1}', "'temprature' must be one of"),
    "hot": ('{"prompt": "a", "temperature": -1}', "temperature must be finite and 0 or more"),
    "none asked": ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens must be a whole number of 1 or more"),
    "a seed of chance": ('{"prompt": "a", "seed": null}', "seed must be a whole number"),
    "stop": ('{"prompt": "a", "stop": null}', "stop must be a string"),
    "roles": ('{"messages": [{"content": "a"}]}', "messages must be a list of objects with role and content"),
    "half a character": (r'{"prompt": "\ud800 a"}', "got half of one"),
    "half a character in a message": (r'{"messages": [{"role": "user", "content": "\udc00"}]}', "got half of one"),
    "too deep": ('{"prompt": "a", "metadata": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 must be a JSON object"),
    "an end": ('{"prompt": "a", "ignore_eos": "false"}', "ignore_eos must be true or false"),
    "bytes": (b'{"prompt": "\xff"}', "line 2 is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_line_is_named_before_a_model_is_loaded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider, "load", lambda *a, **k: pytest.fail("loaded"))
    line, message = BAD[name]
    held = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + held + b"\n")
    assert run(["batch", str(path), "-o", str(tmp_path / "out.jsonl")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "out.jsonl").exists()


def test_indices_count_prompts_and_not_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n  \n{"prompt": "b", "id": 7}')
    prompts = check_prompts(path, {})
    assert [(job.index, job.prompt, dict(job.passed)) for job in prompts.jobs()] == [(0, "a", {}), (1, "b", {"id": 7})]


def test_an_output_cut_anywhere_in_its_last_line_goes_on_behind_the_line_before(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, {"a": 1}, 9) as journal:
        for index in (4, 2, 7):
            journal.append({"index": index, "tokens": [index], "text": "é"})
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal(path, {"a": 1}, 9) as journal:
            assert [index for index in range(9) if index in journal] == [2, 4]
            journal.append({"index": 7, "tokens": [7], "text": "é"})
        assert path.read_bytes() == whole


def test_an_output_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, {"seed": 1}, 3) as journal:
        with pytest.raises(ParameterError, match="being written by another process"):
            Journal(path, {"seed": 1}, 3)
        journal.append({"index": 0, "tokens": []})
    with pytest.raises(ParameterError, match=r"seed: 1 there, 2 here.*another --output"):
        Journal(path, {"seed": 2}, 3)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ParameterError, match="twice"):
        Journal(path, {"seed": 1}, 3)
    path.write_text('{"index": 0}\nwhat?\n{"index": 1}\n')
    with pytest.raises(ParameterError, match="line 2 is no record"):
        Journal(path, {"seed": 1}, 3)
    (tmp_path / "out.jsonl.run").unlink()
    with pytest.raises(ParameterError, match="not made by outrider batch"):
        Journal(path, {"seed": 1}, 3)


def batch_command(source: Path, output: Path, target: Path) -> list[str]:
    options = ["--target", str(target), "--dtype", "float64", "--temperature", "1", "--ignore-eos", "--max-new-tokens", "30"]
    return ["batch", str(source), "-o", str(output), "--batch-size", "4", "--num-draft-tokens", "2", *options]


def texts(path: Path) -> dict[int, tuple[list[int], str]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["index"] for one in records}) == len(records)
    return {one["index"]: (one["tokens"], one["text"]) for one in records}


def test_killed_three_times_and_gone_on_nothing_is_lost_or_doubled(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    source.write_text("".join(json.dumps({"prompt": f"{PROMPTS[i % 8]} {i}"}) + "\n" for i in range(120)))
    command = batch_command(source, output, target_folder)
    for signal_number, least in ((signal.SIGKILL, 1), (signal.SIGINT, 30), (signal.SIGKILL, 50)):
        # Whoever runs the tests in the background has interrupts ignored, and children inherit that.
        heeding = ["env", "--default-signal=INT", sys.executable, "-m", "outrider"]
        process = subprocess.Popen([*heeding, *command, "--json"], stdout=-1, stderr=-1)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if output.exists() and output.read_bytes().count(b"\n") >= least:
                process.send_signal(signal_number)
                break
            time.sleep(0.002)
        out, err = process.communicate()
        assert process.returncode == (130 if signal_number == signal.SIGINT else -signal.SIGKILL), err
        if signal_number == signal.SIGINT:
            assert b"interrupted after" in err
            assert json.loads(out)["complete"] is False
    held = output.read_bytes().count(b"\n")
    assert 50 <= held < 120
    assert run([*command, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["complete"]
    assert summary["done"] == 120
    assert summary["prompts"] == 120 - summary["before"]
    assert run(batch_command(source, whole, target_folder)) == 0
    assert texts(output) == texts(whole)
    assert sorted(texts(output)) == list(range(120))
    assert run([*command, "--seed", "9"]) == 2
    assert "seed: 0 there, 9 here" in capsys.readouterr().err


def test_drafts_that_remember_other_prompts_are_refused(target_folder: Path) -> None:
    with pytest.raises(ParameterError, match="can't keep texts in a batch"):
        Setup(draft=("suffix:memory=yes",), defaults=DEFAULTS).use(outrider.load(target_folder, dtype="float64"))


def test_fixed_lengths_go_on_in_batches_of_another_size(target_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    command = batch_command(source, output, target_folder)
    assert run(command) == 0
    first = output.read_bytes()
    assert run([*command, "--batch-size", "2"]) == 0
    assert output.read_bytes() == first
    assert run([*command, "--num-draft-tokens", "auto"]) == 2


def test_lines_that_all_sample_otherwise_may_join_together() -> None:
    jobs = [Job(i, "def f(", {"temperature": 1 - i / 10, "max_new_tokens": 3}) for i in range(5)]
    ready = Setup(draft=(), num_draft_tokens=0, batch_size=2, defaults=DEFAULTS).use(TextTable())
    with ContinuousBatch(ready, 2) as batch:
        batch.put(jobs)
        found = [record["index"] for _ in range(40) if batch.load for record in batch.advance()]
        assert len(batch._lanes) <= 5
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_an_ngram_draft_keeps_what_it_knows_of_the_settings_by_row(tmp_path: Path) -> None:
    """A greedy row whose guesses are certain must not change how a row that samples learns."""
    target = TextTable()
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, 9, (800,), generator=generator).tolist() for _ in range(5)]
    table_file = trained(tmp_path / "counted", documents, size=target.vocab_size, order=2, min_count=1)
    drafter = NgramDrafter(table_file)
    drafter.table.tokenizer = fingerprint(target)
    rows = [DraftRow([1, 2, 3], 3, RandomStream(0), target.open()) for _ in range(2)]
    drafter.begin(rows[:1], DraftContext(SAMPLED, target, target.vocab_size))
    drafter.begin(rows[1:], DraftContext(SamplingSettings(), target, target.vocab_size))
    assert [drafter.prospects(row)[0].foretold for row in rows] == [False, True]
