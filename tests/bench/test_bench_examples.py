"""The papers' tasks: where examples come from, and how they are put to a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import processors

import outrider
from outrider.bench.asking import prompt_tokens, stops
from outrider.bench.examples import CODE_STOPS, KINDS, Source, load_examples
from outrider.bench.texts import chat
from outrider.errors import MissingPackageError, ParameterError
from outrider.support.tables import load_hub, read_table
from tests.helpers.folders import make_tokenizer
from tests.helpers.task_data import ROWS, write


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
    with pytest.raises(MissingPackageError, match="pip install datasets`, or give --data"):
        load_hub("x", None, "test", 1)
    with pytest.raises(MissingPackageError, match="pip install pyarrow"):
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
        (Source("jsonl:a", Path("b")), "the data must be named once, got 'jsonl:a' and --data b"),
        (Source("humaneval", prompt_column="x"), "task humaneval reads no columns"),
        (Source("jsonl:a", reference_column="x"), "metric none reads no references"),
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


def test_a_chat_prompt_begins_once() -> None:
    """Whether the template, the tokenizer, or both put the beginning-of-sequence token there."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    assert tokenizer.encode(chat(tokenizer, "hello")).count(tokenizer.bos_token_id) == 1
    begin = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    assert tokenizer.encode(chat(tokenizer, "hello")).count(tokenizer.bos_token_id) == 1
