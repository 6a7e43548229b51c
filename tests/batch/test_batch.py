"""Batches of prompts: a prompt's output depends on the prompt alone, and no more prompts are read than there is room for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.batch.job_batch import JobBatch
from outrider.batch.jobs import Job
from outrider.batch.run import run_here
from outrider.batch.setup import Setup
from outrider.cli.main import run
from outrider.drafters import NgramDrafter
from outrider.drafters.base import DraftContext
from outrider.errors import ModelError, ParameterError
from outrider.models.compatibility import fingerprint
from outrider.models.table import TableModel
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.structured import Structure
from tests.helpers.batch_prompts import DEFAULTS, PROMPTS
from tests.helpers.folders import make_tokenizer
from tests.helpers.marks import slow
from tests.helpers.ngrams import trained

SAMPLED = SamplingSettings(temperature=1.0)


def computed(target: Any, setup: Setup, jobs: list[Job], tables: Any = None) -> dict[int, dict[str, Any]]:
    ready = setup.use(target, tables)
    found = {}
    with JobBatch(ready, setup.batch_size) as batch:
        batch.put(jobs)
        while batch.load:
            for record in batch.advance():
                assert record["index"] not in found
                found[record["index"]] = record
    return found


def jobs_of(prompts: list[str]) -> list[Job]:
    return [Job(i, prompt, {"max_new_tokens": 4 + 5 * (i % 3)}) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("dtype", [slow("float64"), "int8"])
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


def test_adapted_lengths_follow_from_the_tables_of_the_run(
    target_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of fewer rows, too: a later part measures nothing."""
    monkeypatch.setattr("outrider.costs.book.held_or_measured", lambda model, rows=1: pytest.fail("measured"))
    target = outrider.load(target_folder, dtype="float64")
    setup = Setup(draft=(str(draft_folder), "suffix"), batch_size=4, dtype="float64", defaults=DEFAULTS)
    about = {"seconds": {"1": 1.0, "9": 1.1}, "per_token": {}, "context": 64}
    costs = {f"{folder} float64": about for folder in (target_folder, draft_folder)}
    tables = {"target": f"{target_folder} float64", "costs": costs, "alone": costs}
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


def test_what_ends_the_run_while_prompts_are_read_is_no_lines_own_error() -> None:
    """A rank that has gone, say: a line with an error would not be tried again."""

    class Gone(TextTable):
        def score(self, *given: Any, **more: Any) -> Any:
            if "none" in given:
                raise ModelError("the team has gone")
            return super().score(*given, **more)

    target = Gone()
    ready = Setup(draft=(), num_draft_tokens=0, batch_size=4, defaults=DEFAULTS).use(target)
    with JobBatch(ready, 4) as batch:
        batch.put(jobs_of(PROMPTS))
        with pytest.raises(ModelError, match="the team has gone"):
            batch.advance()


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


def test_drafts_that_remember_other_prompts_are_refused(target_folder: Path) -> None:
    with pytest.raises(ParameterError, match="can't keep texts in a batch"):
        Setup(draft=("suffix:memory=yes",), defaults=DEFAULTS).use(outrider.load(target_folder, dtype="float64"))


def test_lines_that_all_sample_otherwise_may_join_together() -> None:
    jobs = [Job(i, "def f(", {"temperature": 1 - i / 10, "max_new_tokens": 3}) for i in range(5)]
    ready = Setup(draft=(), num_draft_tokens=0, batch_size=2, defaults=DEFAULTS).use(TextTable())
    with JobBatch(ready, 2) as batch:
        batch.put(jobs)
        found = [record["index"] for _ in range(40) if batch.load for record in batch.advance()]
        assert len(batch._lanes.by_kind) <= 5
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_of_idle_lanes_the_oldest_are_dropped() -> None:
    ready = Setup(draft=(), num_draft_tokens=0, batch_size=2, defaults=DEFAULTS).use(TextTable())
    with JobBatch(ready, 2) as batch:
        made = []
        for i, temperature in enumerate((1.0, 0.9, 0.8, 0.9, 0.7, 0.9)):
            batch.put([Job(i, "def f(", {"temperature": temperature, "max_new_tokens": 3})])
            while batch.load:
                batch.advance()
            made.append(list(batch._lanes.by_kind.values())[-1])
        batch.advance()
        assert list(batch._lanes.by_kind.values()) == [made[4], made[5]]
        assert made[1] is made[3] is made[5]


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
    assert [drafter.prospects(row)[0].deterministic for row in rows] == [False, True]


COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "lazy dog"]}}, "required": ["colour"]}


def test_structure_biases_and_logprobs_are_those_of_generate(target_folder: Path, draft_folder: Path) -> None:
    """Each line with what it asks for, beside lines that ask for something else, one by one as `generate` gives it."""
    target = outrider.load(target_folder, dtype="float64")
    draft = outrider.load(draft_folder, dtype="float64")
    pattern, schema = Structure(regex="[0-9]{2}-[a-f]{3}"), Structure(json_schema=json.dumps(COLOURS))
    banned = dict.fromkeys(range(5, 300), -math.inf)
    lines: list[dict[str, Any]] = [
        {},
        {"regex": pattern.regex},
        {"json_schema": schema.json_schema, "logprobs": True},
        {"regex": None},
        {"logit_bias": banned, "regex": None},
        {"logit_bias": banned, "regex": None, "logprobs": True},
        {"regex": pattern.regex, "json_schema": None},
    ]
    followed = [pattern, pattern, schema, None, None, None, pattern]
    defaults = {**DEFAULTS, "ignore_eos": False, "regex": pattern.regex, "max_new_tokens": 60, "alternatives": 0}
    setup = Setup(draft=(str(draft_folder),), num_draft_tokens=2, batch_size=4, dtype="float64", defaults=defaults)
    found = computed(target, setup, [Job(i, "fox", {**line, "seed": i}) for i, line in enumerate(lines)])
    for i, (line, structure) in enumerate(zip(lines, followed, strict=True)):
        options: dict[str, Any] = {name: line[name] for name in ("logit_bias", "logprobs") if name in line}
        options["processors"] = () if structure is None else structure.constraints(target)
        options |= {"draft": draft, "num_draft_tokens": 2, "temperature": 1.0, "max_new_tokens": 60, "seed": i}
        alone = outrider.generate(target, "fox", **options)
        assert (found[i]["text"], found[i]["tokens"]) == (alone.text, alone.tokens)
        assert ("logprobs" in found[i]) is line.get("logprobs", False)
        assert found[i].get("logprobs") == pytest.approx(alone.logprobs)
        if structure is pattern:
            assert re.fullmatch("[0-9]{2}-[a-f]{3}", found[i]["text"])
        if structure is schema:
            assert json.loads(found[i]["text"])["colour"] in ("red", "lazy dog")
        if "logit_bias" in line:
            assert not banned.keys() & set(found[i]["tokens"])


def test_the_command_takes_structure_and_biases_and_goes_on(
    target_folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output, schema = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "schema.json"))
    schema.write_text(json.dumps(COLOURS))
    lines: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": "b", "json_schema": None, "max_new_tokens": 5}]
    source.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": [100_000]}]))
    command = ["batch", str(source), "-o", str(output), "--target", str(target_folder), "--dtype", "float32"]
    command += ["--json-schema", str(schema), "--logit-bias", "17=-inf", "--logit-bias", "18=-2.5", "--logprobs"]
    command += ["--max-new-tokens", "60", "--num-draft-tokens", "2", "--raw"]
    assert run([*command]) == 1
    told = capsys.readouterr().err
    assert "outrider: prompt 2: " in told
    assert "100000" in told

    def written() -> dict[int, dict[str, Any]]:
        found = map(json.loads, output.read_text().splitlines())
        return {one["index"]: {key: value for key, value in one.items() if key != "stats"} for one in found}

    records = written()
    assert json.loads(records[0]["text"])["colour"] in ("red", "lazy dog")
    assert len(records[1]["tokens"]) == len(records[1]["logprobs"]) == 5
    whole = output.read_text()
    output.write_text(whole[: whole.index("\n") + 1])
    assert run(command) == 1
    assert written() == records
    assert run([*command, "--regex", "a"]) == 2
    assert "regex: None there, 'a' here" in capsys.readouterr().err
    bad = [part if part != "17=-inf" else "17:-inf" for part in command]
    assert run(bad) == 2
    assert "logit_bias must be ID=VALUE, a token id and a number or -inf, got '17:-inf'" in capsys.readouterr().err


def test_lenience_is_each_lines_and_said_to_be_lossy(
    target_folder: Path, draft_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    prompts = PROMPTS[:4]
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "seed": i}) + "\n" for i, text in enumerate(prompts)))
    models = ["--target", str(target_folder), "--draft", str(draft_folder), "--dtype", "float64"]
    command = ["batch", str(path), "-o", str(output), *models, "--temperature", "1", "--max-new-tokens", "12", "--raw"]
    assert run([*command, "--lenience", "0.3", "--num-draft-tokens", "3"]) == 0
    assert "LOSSY: lenience 0.3" in capsys.readouterr().err
    target, draft = (outrider.load(folder, dtype="float64") for folder in (target_folder, draft_folder))
    options: dict[str, Any] = {"draft": draft, "num_draft_tokens": 3, "temperature": 1.0, "max_new_tokens": 12}
    found = sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda one: one["index"])
    differ = 0
    for i, one in enumerate(found):
        lenient, exact = (outrider.generate(target, prompts[i], seed=i, lenience=x, **options) for x in (0.3, 1.0))
        assert one["tokens"] == lenient.tokens
        assert (one["lossy"], one["lenience"]) == (True, 0.3)
        differ += lenient.tokens != exact.tokens
    assert differ
    for wrong, told in (
        ([], "in (0, 1]"),
        (["--plain"], "without a draft"),
        (["--num-draft-tokens", "0"], "without a draft"),
    ):
        assert run([*command, "--lenience", "0" if not wrong else "0.5", *wrong]) == 2
        assert told in capsys.readouterr().err


def test_a_batchs_texts_may_be_made_to_depend_on_no_draft(
    target_folder: Path, draft_folder: Path, tmp_path: Path, cache: Path
) -> None:
    path, outputs = tmp_path / "in.jsonl", [tmp_path / f"out{i}.jsonl" for i in range(3)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS[:5]))
    command = ["batch", str(path), "--target", str(target_folder), "--dtype", "float64", "--temperature", "1", "--raw"]
    command += ["--max-new-tokens", "12", "--drafter-invariant", "--seed", "2"]
    drafts = (
        ["--plain"],
        ["--draft", str(draft_folder), "--batch-size", "2"],
        ["--draft", "suffix", "--num-draft-tokens", "2"],
    )
    for output, draft in zip(outputs, drafts, strict=True):
        assert run([*command, "-o", str(output), *draft]) == 0
    found = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
    texts = [{one["index"]: one["tokens"] for one in lines} for lines in found]
    assert texts[0] == texts[1] == texts[2]
    assert all(one["drafter_invariant"] for lines in found for one in lines)
    target = outrider.load(target_folder, dtype="float64")
    alone = outrider.generate(
        target, PROMPTS[:5], draft=None, temperature=1.0, max_new_tokens=12, seed=2, drafter_invariant=True
    )
    assert [one.tokens for one in alone] == [texts[0][i] for i in range(5)]


def test_without_a_terminal_lines_tell_how_far_it_is(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr("outrider.cli.batch._EVERY", -1.0)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS[:2]))
    command = ["batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--target", str(target_folder), "--batch-size", "1"]
    assert run([*command, "--plain", "--max-new-tokens", "4", "--raw"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines[:2]] == [f"outrider: {done} of 2 prompts" for done in (1, 2)]
    assert all(line.endswith(" tokens/s") for line in lines[:2])


def test_a_line_whose_prompt_can_not_be_read_is_an_error_of_its_own(target_folder: Path, monkeypatch: Any) -> None:
    target = outrider.load(target_folder, dtype="float64")
    lost = target.tokenizer.encode("zebra")
    score = type(target).score

    def failing(self: Any, sequences: Any, tokens: Any, lengths: Any, logits: Any = "all") -> Any:
        if logits == "none" and any(row[: len(lost) - 1] == lost[:-1] for row in tokens.tolist()):
            raise RuntimeError("no\nroom")
        return score(self, sequences, tokens, lengths, logits)

    monkeypatch.setattr(type(target), "score", failing)
    setup = Setup(draft=(), batch_size=4, chat=False, defaults={**DEFAULTS, "max_new_tokens": 4})
    found = computed(target, setup, [Job(0, "abc"), Job(1, "zebra"), Job(2, "the man")])
    assert found[1]["error"] == "RuntimeError: no room"
    assert [len(found[i]["tokens"]) for i in (0, 2)] == [4, 4]
    with pytest.raises(RuntimeError, match="no"):  # nobody went on: it may not be the line's
        computed(target, setup, [Job(0, "zebra")])
