"""Training text: files, folders, texts of the target (`outrider train texts`) and data sets, as windows of tokens.

Documents are laid end to end and cut into windows, so that nothing is padded. Every `HELD_OUT_EVERY`-th document of a
source is kept apart by number, the last one where there are fewer, before anything is cut: no window of it is trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ParameterError, in_one_line
from outrider.support.optional import optional
from outrider.support.text_files import is_text

HELD_OUT_EVERY = 50
LONGEST_DOCUMENT = 1 << 20  # characters read of one file
DATASET = "dataset:"
Document = TypeVar("Document")


@dataclass(frozen=True)
class Tokens:
    """A document that is token ids already, which the target wrote. asked: how many of them are its prompt."""

    ids: list[int]
    asked: int = 0

    @property
    def drafted(self) -> list[int]:
        """1 for each token that a draft may stand for, 0 for those of the prompt."""
        return [int(place >= self.asked) for place in range(len(self.ids))]


@dataclass(frozen=True)
class Window:
    """tokens: uint32 [L]. drafted: bool [L], `Tokens.drafted`."""

    tokens: NDArray[np.uint32]
    drafted: NDArray[np.bool_]


@dataclass(frozen=True)
class Source:
    """Where text comes from: "PATH" or "dataset:NAME[,split=S,column=C,config=G]", at most `limit` tokens of it."""

    name: str
    limit: int | None = None


def parse_source(text: str) -> Source:
    """SOURCE or SOURCE@TOKENS, a limit in tokens ("notes@200000")."""
    name, at, limit = text.rpartition("@")
    if not at or (not limit.isdigit() and (Path(text).expanduser().exists() or not limit.lstrip("-").isalnum())):
        return Source(text)
    if not limit.isdigit():
        raise ParameterError(f"data must be SOURCE or SOURCE@TOKENS, a number of tokens, got {text!r}")
    if int(limit) < 1:
        raise ParameterError(f"data must be SOURCE or SOURCE@TOKENS with at least one token, got {text!r}")
    return Source(name, int(limit))


def windows(sources: Iterable[Source], tokenizer: Any, length: int, held_out: bool | None) -> Iterator[Window]:
    """Windows of `length` tokens. held_out: only the documents kept apart, only the others, or (None) all of them."""
    for source in sources:
        every = marked(documents(source.name, tokenizer))
        first, second = tee(one for one, apart in every if held_out in (None, apart))
        tokens = cut((one.ids for one in first), length, source.limit)
        drafted = cut((one.drafted for one in second), length, source.limit)
        yield from (Window(ids, flags.astype(bool)) for ids, flags in zip(tokens, drafted, strict=True))


def cut(every: Iterable[list[int]], length: int, limit: int | None) -> Iterator[NDArray[np.uint32]]:
    """Documents laid end to end, as windows; of `limit` tokens at most."""
    rest: list[int] = []
    taken = 0
    for document in every:
        rest += document
        while len(rest) >= length and (limit is None or taken + length <= limit):
            yield np.array(rest[:length], dtype=np.uint32)
            rest, taken = rest[length:], taken + length
        if limit is not None and taken + length > limit:
            return


def marked(every: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
    """Each document, and whether it is kept apart. Of a single one nothing is."""
    waiting: Document | None = None  # until it is known whether it is the last
    number = 0
    for document in every:
        if waiting is not None:
            yield waiting, number % HELD_OUT_EVERY == 0
        waiting, number = document, number + 1
    if waiting is not None:
        yield waiting, number % HELD_OUT_EVERY == 0 or 1 < number < HELD_OUT_EVERY


def documents(name: str, tokenizer: Any) -> Iterator[Tokens]:
    """The token ids of each document of a source."""
    for text in texts_of(name):
        found = text if isinstance(text, Tokens) else Tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
        if found.ids:
            yield found


def texts_of(name: str) -> Iterator[str | Tokens]:
    """The documents of a source."""
    if name.startswith(DATASET):
        return _dataset(name.removeprefix(DATASET))
    return (document for file in files_of(name) for document in _of_file(file))


def files_of(name: str) -> list[Path]:
    """The texts that a source names, in the order in which they are read; what else lies in a folder is left out.

    Raises `ParameterError` if there are none.
    """
    path = Path(name).expanduser()
    if not path.exists():
        raise ParameterError(f"data {name} does not exist: name text files, folders, .jsonl files or dataset:NAME")
    if not path.is_dir():
        if not is_text(path):
            raise ParameterError(f"data {name} must be text in UTF-8, and its beginning is not: leave it out, or convert it")
        return [path]
    found = _shuffled(file for file in _within(path) if is_text(file))
    if not found:
        raise ParameterError(f"data {name} must hold text, and none of its files is: name another folder")
    return found


def left_out(name: str) -> int:
    """How many files of a folder are no text."""
    path = Path(name).expanduser()
    if name.startswith(DATASET) or not path.is_dir():
        return 0
    return sum(not is_text(file) for file in _within(path))


def _within(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file())


def stamp(name: str) -> list[object]:
    """What changes when a source's files do: size and time of a file, of each file of a folder; nothing of a data set."""
    if name.startswith(DATASET):
        return []
    files = files_of(name)
    times = [(status.st_size, status.st_mtime_ns) for status in (file.stat() for file in files)]
    if not Path(name).expanduser().is_dir():
        return list(times[0])
    return [[str(file), *one] for file, one in zip(files, times, strict=True)]


def _shuffled(files: Iterable[Path]) -> list[Path]:
    """In an order that depends on the names only, so that a limit takes something of everything."""
    return sorted(files, key=lambda file: hashlib.sha256(str(file).encode()).digest())


def _of_file(path: Path) -> Iterator[str | Tokens]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            if path.suffix == ".jsonl":
                lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
                yield from (entry for number, line in lines if (entry := _of_line(line, f"{path}, line {number},")))
            else:
                while text := file.read(LONGEST_DOCUMENT):
                    yield text
    except OSError as error:
        raise ParameterError(f"data {path} can't be read: {error.strerror}") from None


def _of_line(line: str, where: str) -> str | Tokens:
    """Token ids or text of one JSON object; nothing of a log's first line."""
    try:
        entry = json.loads(line)
        if "settings" in entry:
            return ""
        ids, text = entry.get("tokens"), entry.get("text")
        if isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids):
            return Tokens(ids, int(entry.get("prompt_tokens", 0)))
        if ids is None and isinstance(text, str):
            return text
    except (ValueError, TypeError, AttributeError):
        pass
    raise ParameterError(f'data {where} must be {{"text": text}} or {{"tokens": token ids}}, got {line.strip()[:60]!r}')


def _dataset(text: str) -> Iterator[str]:
    """A data set of the hub or of a folder, streamed."""
    name, *pairs = text.split(",")
    options = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    unknown = options.keys() - {"split", "column", "config"}
    if unknown or len(options) < len(pairs):
        raise ParameterError(f"data dataset:{text} must be dataset:NAME[,split=S,column=C,config=G]")
    load_dataset = optional("datasets", f"data set {name}").load_dataset
    try:
        rows = load_dataset(name, options.get("config"), split=options.get("split", "train"), streaming=True)
        for row in rows:
            yield str(row[options.get("column", "text")])
    except KeyError as error:
        raise ParameterError(f"data set {name} has no column {error}: give dataset:{name},column=NAME") from None
    except Exception as error:  # the library raises errors of many packages
        reason = in_one_line(error, 200)
        raise ParameterError(f"data set {name} can't be read: {reason}") from error
