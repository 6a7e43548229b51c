"""The papers' tasks: where examples come from, how answers are scored, what is run, what is kept, what is refused."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tokenizers import processors

import outrider
from outrider.bench.examples import CODE_STOPS, KINDS, Example, Source, load_examples, prompt_tokens, stops
from outrider.bench.humaneval import _problems, _try_runner, completion_of, run_tests
from outrider.bench.quality import Answer, Bleu, Mean, Perplexity, difference, estimate, exact, make_metric, rouge2
from outrider.bench.run_log import RunLog
from outrider.bench.tables import load_hub, read_table
from outrider.bench.texts import chat
from outrider.cli.main import cli
from outrider.errors import ParameterError
from tests.conftest import make_tokenizer

ROWS = [
    {"document": "the quick brown fox jumps", "summary": "a fox jumps"},
    {"document": "def f(x): return x + 1", "summary": "a function, with a comma"},
    {"document": "naïve café", "summary": "coffee"},
]


def answer(text: str, reference: str | None = None, name: str = "one") -> Answer:
    return Answer(Example(name, "p", reference=reference), [1], [2], text)


# Where examples come from


def write(folder: Path, ending: str) -> Path:
    path = folder / f"data.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif ending == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["document", "summary"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_local_files_of_all_kinds_hold_the_same_examples(tmp_path: Path, ending: str) -> None:
    found = load_examples(Source("xsum", write(tmp_path, ending), prompts="1-2"))
    assert [(one.prompt, one.reference, one.number) for one in found] == [
        (ROWS[1]["document"], ROWS[1]["summary"], 1),
        (ROWS[2]["document"], ROWS[2]["summary"], 2),
    ]
    assert found[0].chat


def test_a_data_set_by_name_is_loaded_by_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is a name to the library, so this is its own code, without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", "jsonl").rename(tmp_path / "set" / "test.jsonl")
    datasets.disable_progress_bars()
    assert [dict(row) for row in load_hub(str(tmp_path / "set"), None, "test", 2)] == ROWS[:2]
    with pytest.raises(ParameterError, match=r"can't be loaded.*--data FILE"):
        load_hub(str(tmp_path / "set"), None, "nowhere", 2)


def test_the_hub_out_of_reach_is_one_clear_line() -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(outrider.__file__).parents[1])}
    command = [sys.executable, "-m", "outrider", "bench", "tasks", "--task", "xsum"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "EdinburghNLP/xsum can't be loaded" in line
    assert line.endswith("give a local copy as --data FILE")


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ParameterError, match=r"outrider\[datasets\]"):
        load_hub("x", None, "test", 1)
    with pytest.raises(ParameterError, match=r"outrider\[datasets\]"):
        read_table(path)


def test_nested_columns_and_columns_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "wmt.jsonl"
    path.write_text(json.dumps({"translation": {"en": "Good day", "de": "Guten Tag"}, "id": "a"}))
    (nested,) = load_examples(Source("wmt", path))
    assert (nested.name, nested.prompt, nested.reference) == ("a", "Good day", "Guten Tag")
    path.write_text(json.dumps({"article": "Long.", "highlights": "Short.", "id": "b"}))
    (news,) = load_examples(Source("cnn_dailymail", path))
    assert (news.name, news.prompt, news.reference) == ("b", "Long.", "Short.")
    path.write_text(json.dumps({"translation": {"en": "Good day", "de": "Guten Tag"}}))
    (other,) = load_examples(Source(f"jsonl:{path}", prompt_column="translation.de"))
    assert (other.prompt, other.reference) == ("Guten Tag", None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("nothing"), "task must be"),
        (Source("jsonl"), "jsonl:FILE"),
        (Source("jsonl:/no/such/file"), "does not exist"),
        (Source("xsum:file"), "--data FILE"),
        (Source("chat", Path("x")), "reads no file"),
        (Source("chat", prompts="0"), "prompts must be"),
        (Source("chat", prompts="5-2"), "prompts must be"),
        (Source("chat", prompts="20-30"), "the data has no more"),
        (Source("humaneval", prompts="164-170"), "prompts must be in 0 … 163"),
    ],
)
def test_sources_that_make_no_sense_are_refused(source: Source, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        load_examples(source)


def test_broken_data_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for text, message in (
        ('{"prompt": "a"}\n{"prompt": ', "line 2: no JSON"),
        ("[1]\n", "line 1: must be an object"),
        ("", "holds no rows"),
        ('{"text": "a"}\n', "there is no prompt, the columns are text"),
        ('{"prompt": 3}\n', "row 0 must have text"),
    ):
        path.write_text(text)
        with pytest.raises(ParameterError, match=message):
            load_examples(Source(f"jsonl:{path}"))
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ParameterError, match="there is no reference"):
        load_examples(Source(f"jsonl:{path}", metric="bleu"))


def test_the_chat_prompts_are_twenty_different_ones() -> None:
    found = load_examples(Source("chat"))
    assert len(found) == len({one.name for one in found}) == len({one.prompt for one in found}) == 20


def test_prompts_are_put_as_the_model_takes_them(target_folder: Path) -> None:
    base, kind = outrider.load(target_folder), KINDS["xsum"]
    (example,) = load_examples(Source("chat", prompts="0-0"))
    assert base.tokenizer.decode(prompt_tokens(base, kind, example)) == f"{example.prompt}\n\nTL;DR:"
    assert stops(base, kind, example) == ("\n\n",)
    chat = outrider.load(target_folder)
    chat.tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    asked = chat.tokenizer.decode(prompt_tokens(chat, kind, example))
    assert asked == "<user>" + (kind.chat or "").format(example.prompt)
    assert stops(chat, kind, example) == ()
    code = KINDS["humaneval"]
    (problem,) = load_examples(Source("humaneval", prompts="0-0"))
    assert chat.tokenizer.decode(prompt_tokens(chat, code, problem)).endswith(f"```python\n{problem.prompt}```")
    assert stops(chat, code, problem) == ()
    (bare,) = load_examples(Source("humaneval", prompts="0-0", raw=True))
    for model, one in ((chat, bare), (outrider.load(target_folder), problem)):
        assert model.tokenizer.decode(prompt_tokens(model, code, one)) == problem.prompt
        assert stops(model, code, one) == CODE_STOPS
    assert prompt_tokens(base, KINDS["lm1b"], load_examples(Source("lm1b"))[0]) == [base.tokenizer.bos_token_id]


# How answers are scored


def test_scores_are_those_of_the_packages() -> None:
    from sacrebleu.metrics.bleu import BLEU

    assert rouge2().sums(answer("the cat sat on a mat", "the cat sat on the mat")) == [pytest.approx(0.6), 1.0]
    assert exact().sums(answer(" yes\n", "yes")) == [1.0, 1.0]
    bleu, answers = Bleu(), ["Das ist ein kleines Haus.", "Guten Tag, wie geht es Ihnen?"]
    references = ["Das ist ein sehr kleines Haus.", "Guten Morgen, wie geht es Ihnen heute?"]
    sums = [bleu.sums(answer(a, r)) for a, r in zip(answers, references, strict=True)]
    corpus = BLEU().corpus_score(answers, [references]).score
    assert estimate(bleu, sums).value == pytest.approx(corpus)
    assert estimate(bleu, sums).low < corpus < estimate(bleu, sums).high


def test_perplexity_is_that_of_the_target(target_folder: Path) -> None:
    model = outrider.load(target_folder, dtype="float64")
    made = outrider.generate(
        model, "fox", draft=None, max_new_tokens=70, temperature=1.0, seed=3, ignore_eos=True, logprobs=True
    )
    prompt = model.tokenizer.encode("fox")
    sums = Perplexity(model).sums(Answer(Example("one", "fox"), prompt, made.tokens, made.text))
    assert made.logprobs is not None
    assert sums == [pytest.approx(-sum(made.logprobs), rel=1e-5), 70.0]
    assert estimate(Perplexity(model), [sums]).value == pytest.approx(math.exp(sums[0] / 70), rel=1e-9)


def test_intervals_are_as_wide_as_theory_says_and_paired_differences_narrower() -> None:
    metric = Mean("m", lambda answer: 0.0)
    generator = np.random.default_rng(1)
    passed = (generator.random(400) < 0.3).astype(float)
    also = np.where(generator.random(400) < 0.05, 1 - passed, passed)  # nearly the same answers
    ours, theirs = ([[x, 1.0] for x in side] for side in (passed, also))
    found = estimate(metric, ours)
    width = 2 * 1.96 * math.sqrt(found.value * (1 - found.value) / 400)
    assert found.high - found.low == pytest.approx(width, rel=0.1)
    paired = difference(metric, ours, theirs)
    assert paired.value == pytest.approx(passed.mean() - also.mean())
    assert paired.high - paired.low < 0.6 * width
    same = difference(metric, ours, ours)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    assert estimate(metric, ours) == found  # seeded


def test_several_answers_to_a_prompt_are_resampled_together() -> None:
    metric = Mean("m", lambda answer: 0.0)
    alone = estimate(metric, [[1.0, 1.0], [0.0, 1.0]] * 20)
    tenfold = estimate(metric, [[10.0, 10.0], [0.0, 10.0]] * 20)
    assert tenfold == alone


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ParameterError, match="metric must be one of"):
        make_metric("f1", None)
    assert make_metric("none", None) is None


# Code that a model wrote


def test_programs_pass_fail_and_are_stopped() -> None:
    problem = _problems()["HumanEval/0"]
    assert run_tests(problem, problem["canonical_solution"]) == "passed"
    assert run_tests(problem, "    return None\n").startswith("failed")
    assert run_tests(problem, "    while True:\n        pass\n", seconds=0.5) == "timed out"
    assert run_tests(problem, "    x = bytearray(10 ** 10)\n" + problem["canonical_solution"]).startswith("failed")
    assert run_tests(problem, "    this is no code\n").startswith("failed")


def test_an_answer_is_judged_by_the_tests_of_its_problem() -> None:
    metric, problems = make_metric("pass@1", None, run_code=True), _problems()
    assert metric is not None
    solution = problems["HumanEval/1"]["canonical_solution"]
    assert metric.sums(answer(solution, name="HumanEval/1")) == [1.0, 1.0]
    assert metric.sums(answer(solution, name="HumanEval/2")) == [0.0, 1.0]


def test_programs_see_no_environment_and_can_not_forge_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    problem = _problems()["HumanEval/0"]
    seen = "    import os\n    assert 'A_SECRET' not in os.environ\n"
    assert run_tests(problem, seen + problem["canonical_solution"]) == "passed"
    forged = '    import os\n    os.write(1, b\'{"result": "passed"}\\n\')\n    os._exit(0)\n'
    assert run_tests(problem, forged, seconds=0.5) != "passed"


def test_a_runner_that_runs_nothing_is_found_out() -> None:
    problem = dict(_problems()["HumanEval/0"])
    _try_runner(problem)
    problem["test"] = "def check(candidate):\n    pass\n"  # as if the code were not executed: everything passes
    with pytest.raises(ParameterError, match="does not run code as installed"):
        _try_runner(problem)


def test_code_is_executed_only_when_asked() -> None:
    command = ["bench", "tasks", "--prompts", "1", "--target", "/no/such/model"]
    result = CliRunner().invoke(cli, command)
    assert isinstance(result.exception, ParameterError)
    assert "--execute-generated-code" in str(result.exception)
    assert "\n" not in str(result.exception)
    other = CliRunner().invoke(cli, [*command, "--task", "chat", "--metric", "pass@1", "--execute-generated-code"])
    assert "pass@1 is for task humaneval" in str(other.exception)


# The log


def test_a_log_keeps_what_is_whole_and_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    log = RunLog(path, {"a": 1, "b": ("x",)})
    log.append({"n": 1})
    log.append({"n": 2})
    assert RunLog(path, {"a": 1, "b": ("x",)}).entries == [{"n": 1}, {"n": 2}]
    with path.open("a") as file:
        file.write('{"n": ')
    assert RunLog(path, {"a": 1, "b": ["x"]}).entries == [{"n": 1}, {"n": 2}]
    assert path.read_text().endswith('{"n": 2}\n')
    with pytest.raises(ParameterError, match=r"other settings \(a: 1 there, 2 here\)"):
        RunLog(path, {"a": 2, "b": ["x"]})
    with pytest.raises(ParameterError, match="another command"):
        RunLog(path)
    for foreign in ("notes\nof mine", '{"mine": 1}', "{\n"):
        path.write_text(foreign)
        with pytest.raises(ParameterError, match="log"):
            RunLog(path, {"a": 1})
        assert path.read_text() == foreign
    with pytest.raises(ParameterError, match="can't be written"):
        RunLog(tmp_path / "no" / "folder", {"a": 1})


# The command


def command(folder: Path, *more: str) -> Result:
    options = ["bench", "tasks", "--target", str(folder), "--dtype", "float64", "--max-new-tokens", "10"]
    return CliRunner().invoke(cli, [*options, *more])


def as_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_drafts_and_lengths_beside_plain_decoding(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    path, log = write(tmp_path, "csv"), tmp_path / "runs.jsonl"
    options = ["--task", "xsum", "--data", str(path), "--draft", "prompt-lookup", "--draft", str(draft_folder)]
    options += ["--num-draft-tokens", "1", "--num-draft-tokens", "3", "--samples", "2", "--log", str(log), "--json"]
    found = as_json(command(target_folder, *options))
    names = [name for spec in ("prompt-lookup", draft_folder) for name in (f"{spec}, K = 1", f"{spec}, K = 3")]
    assert [row["drafting"] for row in found["rows"]] == ["plain", *names] * 2
    greedy, sampled = found["rows"][:5], found["rows"][5:]
    assert {row["setting"] for row in greedy} == {"greedy"}
    for row in greedy[1:]:
        assert row["identical"] == row["prompts"] == 3
        assert row["divergences"] == {}
        assert row["against_plain"] == {"value": 0.0, "low": 0.0, "high": 0.0}
        assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
    assert greedy[4]["acceptance_rate"] is not None
    assert greedy[0]["tokens_per_round"] == 1.0
    assert len(log.read_text().splitlines()) == 1 + 5 * 3 * (1 + 2)
    assert all(row["identical"] is None for row in sampled)
    kept = log.read_text()
    assert as_json(command(target_folder, *options))["rows"] == found["rows"]
    assert log.read_text() == kept
    path.write_text(path.read_text().replace("quick", "slow"))  # another prompt under the old name
    as_json(command(target_folder, *options))
    assert len(log.read_text().splitlines()) == len(kept.splitlines()) + 5 * 3
    refused = command(target_folder, *options, "--metric", "none")
    assert "metric: 'rouge2' there, 'none' here" in str(refused.exception)


def test_unconditional_text_has_its_perplexity_on_both_sides(target_folder: Path) -> None:
    found = as_json(command(target_folder, "--task", "lm1b", "--prompts", "3", "--temperature", "1", "--json"))
    plain, drafted = found["rows"]
    for row in (plain, drafted):
        assert 1.0 < row["quality"]["low"] <= row["quality"]["value"] <= row["quality"]["high"]
    assert drafted["against_plain"]["value"] == pytest.approx(drafted["quality"]["value"] - plain["quality"]["value"])


def test_the_code_of_an_answer_is_its_block_or_its_continuation() -> None:
    assert completion_of("    return x\n```\nnot this\n```") == "    return x\n```\nnot this\n```"
    assert (
        completion_of("Here:\n```python\ndef f():\n    return 1\n```\nIt returns 1.\n```\nx\n```")
        == "\n\ndef f():\n    return 1\n"
    )
    assert completion_of("```\nx = 1") == "\n\nx = 1\n", "cut short"
    assert completion_of("def f():\n    return 1") == "def f():\n    return 1"
    problem = _problems()["HumanEval/53"]
    assert run_tests(problem, completion_of("```python\ndef add(x, y):\n    return x + y\n```")) == "passed"
    assert run_tests(problem, completion_of("```python\ndef add(x, y):\n    return x - y\n```")).startswith("failed")


def test_code_that_the_default_model_writes_is_run_and_passes() -> None:
    """HumanEval/23, the length of a string, which SmolLM2 solves greedily."""
    options = ["bench", "tasks", "--dtype", "float32", "--prompts", "23-23", "--max-new-tokens", "40", "--temperature", "0"]
    rows = as_json(CliRunner().invoke(cli, [*options, "--execute-generated-code", "--json"]))["rows"]
    assert [row["quality"]["value"] for row in rows] == [1.0, 1.0]
    assert rows[1]["identical"] == 1


def test_random_weights_write_no_code(target_folder: Path) -> None:
    options = ["--prompts", "23-23", "--temperature", "0", "--execute-generated-code", "--json"]
    rows = as_json(command(target_folder, *options))["rows"]
    assert [row["quality"]["value"] for row in rows] == [0.0, 0.0]


def test_the_table_of_a_file_without_references(target_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "the quick", "id": "q"}\n{"prompt": "0123"}\n')
    result = command(target_folder, "--task", f"jsonl:{path}", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert "2 of 2" in result.stdout
    assert "pass@1" not in result.stdout
    assert "too narrow" not in result.stdout  # no intervals without a metric
    path.write_text('{"prompt": "the quick", "reference": "fox"}\n')
    scored = command(target_folder, "--task", f"jsonl:{path}", "--metric", "exact", "--temperature", "0")
    assert "intervals from 1 prompts are too narrow" in scored.stdout


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-draft-tokens", "65", "num_draft_tokens must be in 1 … 64"),
        ("--max-new-tokens", "0", "max_new_tokens must be 1 or more"),
        ("--samples", "0", "samples must be 1 or more"),
        ("--temperature", "-1", "temperature"),
        ("--top-p", "0", "top_p"),
    ],
)
def test_bad_numbers_are_refused(target_folder: Path, option: str, value: str, message: str) -> None:
    result = command(target_folder, "--task", "chat", option, value)
    assert isinstance(result.exception, ParameterError), result.output
    assert message in str(result.exception)


def test_what_is_timed_is_what_generate_writes(target_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    as_json(command(target_folder, "--task", "chat", "--prompts", "2-2", "--temperature", "1", "--log", str(log), "--json"))
    model = outrider.load(target_folder, dtype="float64")
    (example,) = load_examples(Source("chat", prompts="2-2"))
    wanted = outrider.generate(model, example.prompt, draft=None, max_new_tokens=10, temperature=1.0, seed=2)
    plain = next(one for one in map(json.loads, log.read_text().splitlines()) if one.get("drafting") == "plain")
    assert (plain["tokens"], plain["text"], plain["rounds"]) == (wanted.tokens, wanted.text, wanted.stats.rounds)


def test_a_chat_prompt_begins_once() -> None:
    """Whether the template, the tokenizer, or both put the beginning-of-sequence token there."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert tokenizer.encode(chat(tokenizer, "hello")).count(tokenizer.bos_token_id) == 1
    begin = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    assert tokenizer.encode(chat(tokenizer, "hello")).count(tokenizer.bos_token_id) == 1
