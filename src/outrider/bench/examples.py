"""The papers' tasks: where their examples come from, what a model is asked (by `asking`), where an answer ends, its score.

Prompts are zero-shot. A model with a chat template gets an instruction as a user's turn; a base model gets text to continue:
an article and "TL;DR:" (Radford et al. 2019), or "English: … German:". Chen et al. 2023 gave Chinchilla one example first
and Leviathan et al. 2022 fine-tuned T5, so scores are not theirs; what must agree is plain and speculative decoding.
On HumanEval a model with a chat template is asked for the function in a code block, since some take bare code to be finished
(EXPERIMENTS.md). A base model gets the code to continue, cut at the stop sequences of Chen et al. 2021 (Codex).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.audio import Audio, Recordings
from outrider.bench.tasks import Task, human_eval
from outrider.errors import ParameterError
from outrider.support.tables import Row, column, load_hub, read_table

if TYPE_CHECKING:
    from outrider.request.prompts import Asked

NO_FILE = ("humaneval", "lm1b", "chat")  # tasks whose prompts come with them
NEED_REFERENCES = ("rouge2", "bleu", "wer", "exact")
CODE_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


@dataclass(frozen=True)
class Example(Task):
    """One prompt; an empty one is the beginning of a text.

    number: its place in the data. reference: the answer wanted, if there is one. chat: whether the prompt is a user's turn
    for a model with a chat template. audio: what is to be heard, of an empty prompt.
    """

    number: int = 0
    reference: str | None = None
    chat: bool = False
    audio: Audio | None = None

    @property
    def digest(self) -> str:
        """Tells examples apart whose names agree, in logs."""
        parts: list[Any] = [self.prompt, self.reference, self.chat]
        if self.audio is not None:
            parts += [self.audio.samples.tobytes(), self.audio.rate, self.audio.language, self.audio.task]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Answer:
    """To one example. prompt: what was asked. tokens: ids."""

    example: Example
    prompt: Asked
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class TaskKind:
    """metric: one of `quality.METRICS`. hub: data set, configuration, split on the Hugging Face hub.
    prompt, reference: names that the columns may have; a dot leads into a nested one. raw, chat: the prompt around the
    column's text. stop: where an answer to the raw prompt ends.
    """

    metric: str
    max_new_tokens: int = 128
    hub: tuple[str, str | None, str] | None = None
    prompt: tuple[str, ...] = ("prompt",)
    reference: tuple[str, ...] = ("reference",)
    raw: str = "{}"
    chat: str | None = "{}"
    stop: tuple[str, ...] = ()


KINDS = {
    "humaneval": TaskKind(
        "pass@1",
        512,
        chat="Complete this Python function. Answer with the whole function in one code block and nothing else.\n\n"
        "```python\n{}```",
        stop=CODE_STOPS,
    ),
    "xsum": TaskKind(
        "rouge2",
        hub=("EdinburghNLP/xsum", None, "test"),
        prompt=("document",),
        reference=("summary",),
        raw="{}\n\nTL;DR:",
        chat="Summarise this article in one sentence. Give the sentence only.\n\n{}",
        stop=("\n\n",),
    ),
    "cnn_dailymail": TaskKind(
        "rouge2",
        hub=("abisee/cnn_dailymail", "3.0.0", "test"),
        prompt=("article",),
        reference=("highlights",),
        raw="{}\n\nTL;DR:",
        chat="Summarise this article in three sentences. Give the sentences only.\n\n{}",
        stop=("\n\n",),
    ),
    "wmt": TaskKind(
        "bleu",
        hub=("wmt/wmt14", "de-en", "test"),
        prompt=("translation.en", "en", "source"),
        reference=("translation.de", "de", "target"),
        raw="English: {}\nGerman:",
        chat="Translate into German. Give the translation only.\n\n{}",
        stop=("\n",),
    ),
    "lm1b": TaskKind("perplexity", chat=None),
    "chat": TaskKind("none"),
    "jsonl": TaskKind("none"),
}


@dataclass(frozen=True)
class Source:
    """What the user chose.

    task: a name of `KINDS`, or jsonl:FILE. data: a local file instead of the hub. prompts: N, the first N, or FIRST-LAST,
    counted from 0. raw: never use a chat template. metric: instead of the task's own.
    """

    task: str
    data: Path | None = None
    prompt_column: str | None = None
    reference_column: str | None = None
    prompts: str = "20"
    raw: bool = False
    metric: str | None = None

    @property
    def scored_by(self) -> str:
        """The metric's name."""
        return self.metric or self.kind.metric

    @property
    def name(self) -> str:
        return self.task.partition(":")[0]

    @property
    def file(self) -> Path | None:
        path = self.task.partition(":")[2]
        return Path(path).expanduser() if path else self.data

    @property
    def kind(self) -> TaskKind:
        """Raises `ParameterError` for a task that is not known, or a data file where none is read."""
        if self.name not in KINDS:
            raise ParameterError(f"task must be {', '.join(KINDS)}:FILE, got {self.task!r}")
        if self.data is not None and ":" in self.task:
            raise ParameterError(f"the data must be named once, got {self.task!r} and --data {self.data}: drop one")
        if self.name == "jsonl" and self.file is None:
            raise ParameterError("task jsonl needs a file: jsonl:FILE, a line for each {'prompt': …, 'reference': …}")
        if self.name != "jsonl" and ":" in self.task:
            raise ParameterError(f"task {self.name} takes no file after a colon: give it as --data FILE")
        if self.file is not None and self.name in NO_FILE:
            raise ParameterError(
                f"task {self.name} reads no file: drop --data, or use --task jsonl:FILE for your own prompts"
            )
        if self.prompt_column is not None and self.name in NO_FILE:
            raise ParameterError(f"task {self.name} reads no columns: drop --prompt-column")
        kind = KINDS[self.name]
        if self.reference_column is not None and (self.metric or kind.metric) not in NEED_REFERENCES:
            raise ParameterError(
                f"metric {self.metric or kind.metric} reads no references: drop --reference-column, or name a --metric "
                f"of {', '.join(NEED_REFERENCES)}"
            )
        return kind

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last, from 0."""
        first, dash, last = self.prompts.partition("-")
        try:
            low, high = (int(first), int(last)) if dash else (0, int(first) - 1)
        except ValueError:
            low, high = 1, 0
        if not 0 <= low <= high:
            raise ParameterError(f"prompts must be N, the first N, or FIRST-LAST from 0 on, got {self.prompts!r}")
        return low, high


def load_examples(source: Source) -> list[Example]:
    """The examples that were asked for. Raises `ParameterError` where the data is not to be had, with the remedy."""
    kind, (first, last) = source.kind, source.bounds
    if source.name == "humaneval":
        problems = human_eval(first, min(last, 163))
        return [Example(task.name, task.prompt, first + i, chat=not source.raw) for i, task in enumerate(problems)]
    if source.name == "lm1b":
        return [Example(f"text {i}", "", i) for i in range(first, last + 1)]
    rows = _rows(source, kind, last + 1)
    if first >= len(rows):
        raise ParameterError(f"prompts must be in 0 … {len(rows) - 1}, got {source.prompts}: the data has no more")
    recordings = None if source.file is None else Recordings(source.file.parent)
    asked = range(first, min(last + 1, len(rows)))
    return [_example(source, kind, i, rows[i], recordings) for i in asked]


def _rows(source: Source, kind: TaskKind, count: int) -> Sequence[Row]:
    if source.name == "chat":
        return chat_prompts()
    if source.file is not None:
        return read_table(source.file, lines=source.name == "jsonl")
    assert kind.hub is not None
    return load_hub(*kind.hub, count)


def chat_prompts() -> list[Row]:
    """Twenty requests of different kinds, written for this purpose."""
    text = files("outrider.bench").joinpath("data/chat.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _example(source: Source, kind: TaskKind, number: int, row: Mapping[str, Any], recordings: Recordings | None) -> Example:
    audio = None if recordings is None or "prompt" in row else recordings.named_by(row, f"row {number}")
    text = "" if audio is not None else column(row, _names(source.prompt_column, kind.prompt), "prompt-column")
    names = _names(source.reference_column, kind.reference)
    reference = column(row, names, "reference-column") if source.scored_by in NEED_REFERENCES else None
    chat = kind.chat is not None and not source.raw
    if not isinstance(text, str) or not (text.strip() or audio) or not (reference is None or isinstance(reference, str)):
        raise ParameterError(f"row {number} must have text in its columns for prompt and reference (task {source.name})")
    name = str(row.get("id", number))
    return Example(name, text, number, reference, chat, audio)


def _names(chosen: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    return usual if chosen is None else (chosen,)
