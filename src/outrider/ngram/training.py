"""Counting n-grams in bounded memory: sorted runs on disk, merged by ranges of the hash.

A hundred million tokens make a few billion counts at once nowhere: each chunk of tokens is counted by sorting and written
as a run, and the runs are merged range by range, so that memory depends on the chunk's size only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ParameterError
from outrider.ngram.table import ARRAYS, context_hashes, write_table
from outrider.support.checks import check_count

CHUNK = 2_000_000  # tokens counted at once: some 150 MB
LONGEST = 8  # tokens of an n-gram at most
MERGED = 4_000_000  # counts merged at once
Piece = TypeVar("Piece")
_RUN = np.dtype([("key", "<u8"), ("token", "<u4"), ("count", "<u4")])


@dataclass
class Settings:
    """order: the longest n-gram, 1 … 8. min_count: rarer followers are dropped (of contexts of two tokens and more).
    followers: kept per context at most.
    """

    order: int = 4
    min_count: int = 2
    followers: int = 32

    def __post_init__(self) -> None:
        for name, low, high in (("order", 1, LONGEST), ("min_count", 1, 10**6), ("followers", 1, 10**6)):
            check_count(name, getattr(self, name), low, high)


@dataclass(frozen=True)
class _Part:
    """A document or a part of one; the first `known` tokens were counted before and are context only."""

    tokens: NDArray[np.uint32]
    known: int


@dataclass
class _Counter:
    """What is counted so far."""

    vocab_size: int
    settings: Settings
    folder: Path
    unigrams: NDArray[np.int64] = field(init=False)
    runs: list[list[Path]] = field(init=False)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.unigrams = np.zeros(self.vocab_size, dtype=np.int64)
        self.runs = [[] for _ in range(self.settings.order - 1)]

    def count(self, parts: list[_Part]) -> None:
        """Count a chunk; n-grams don't cross from one document to the next."""
        for part in parts:
            new = part.tokens[part.known :]
            self.unigrams += np.bincount(new, minlength=self.vocab_size)
            self.tokens += len(new)
        for length, runs in enumerate(self.runs, 1):
            keys, tokens = [], []
            for part in parts:
                first = max(length, part.known)  # the first token to be counted after a context
                if len(part.tokens) > first:
                    keys.append(context_hashes(part.tokens[first - length : -1], length))
                    tokens.append(part.tokens[first:])
            if keys:
                path = self.folder / f"run-{length}-{len(runs)}"
                every = np.concatenate(tokens)
                _reduce(np.concatenate(keys), every, np.ones(len(every), dtype=np.uint32)).tofile(path)
                runs.append(path)


def train(
    texts: Iterable[Iterable[Piece]],
    encode: Callable[[list[Piece]], list[list[int]]],
    vocab_size: int,
    tokenizer: str,
    path: Path,
    settings: Settings | None = None,
) -> int:
    """Count the n-grams of some documents and write the table. → the number of tokens

    texts: the documents, each in pieces, of text or whatever `encode` takes. encode: pieces → token ids of each.
    tokenizer: its fingerprint.
    """
    settings = settings or Settings()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".ngram-") as name:
            counter = _Counter(vocab_size, settings, Path(name))
            for chunk in _chunks(texts, encode):
                counter.count(chunk)
            if not counter.tokens:
                raise ParameterError("corpus must hold some text, got none: check the files")
            levels = [_merge(runs, length, counter) for length, runs in enumerate(counter.runs, 1)]
            write_table(path, vocab_size, tokenizer, counter.tokens, counter.unigrams, levels)
            return counter.tokens
    except OSError as error:
        raise ParameterError(f"n-gram table {path} can't be written ({error.strerror}): name another file") from None


def _chunks(texts: Iterable[Iterable[Piece]], encode: Callable[[list[Piece]], list[list[int]]]) -> Iterator[list[_Part]]:
    """Documents, or parts of long ones, until `CHUNK` tokens are together."""
    chunk: list[_Part] = []
    held = 0
    for document in texts:
        tokens: list[int] = []
        known = 0
        for piece in document:
            tokens += encode([piece])[0]
            if held + len(tokens) >= CHUNK:
                yield [*chunk, _Part(np.array(tokens, dtype=np.uint32), known)]
                chunk, held = [], 0
                tokens = tokens[-LONGEST:]
                known = len(tokens)
        if len(tokens) > known:
            chunk.append(_Part(np.array(tokens, dtype=np.uint32), known))
            held += len(tokens)
    if chunk:
        yield chunk


def _reduce(keys: NDArray[np.uint64], tokens: NDArray[Any], counts: NDArray[np.uint32]) -> NDArray[Any]:
    """Counts of equal (key, token) added up, sorted by both. → records"""
    order = np.lexsort((tokens, keys))
    keys, tokens, counts = keys[order], tokens[order], counts[order]
    first = np.ones(len(keys), dtype=bool)
    first[1:] = (keys[1:] != keys[:-1]) | (tokens[1:] != tokens[:-1])
    at = np.flatnonzero(first)
    out = np.empty(len(at), dtype=_RUN)
    out["key"], out["token"] = keys[at], tokens[at]
    out["count"] = np.add.reduceat(counts.astype(np.uint64), at) if len(at) else 0
    return out


def _merge(runs: list[Path], length: int, counter: _Counter) -> dict[str, Path]:
    """Merge the runs of one context length, range by range of the keys, into raw arrays. → their files by name"""
    files = {name: counter.folder / f"{name}-{length}" for name in ARRAYS}
    maps = [np.memmap(run, mode="r", dtype=_RUN) for run in runs if run.stat().st_size]
    entries = sum(len(run) for run in maps)
    parts = max(1, -(-entries // MERGED))
    edges = [(i << 64) // parts for i in range(1, parts)]
    cuts = [[0, *(int(np.searchsorted(run["key"], np.uint64(edge))) for edge in edges), len(run)] for run in maps]
    begin = 0
    with _Writers(files) as out:
        for part in range(parts):
            pieces = [np.array(run[cut[part] : cut[part + 1]]) for run, cut in zip(maps, cuts, strict=True)]
            if pieces and any(len(piece) for piece in pieces):
                both = np.concatenate(pieces)
                begin = _write_part(_reduce(both["key"], both["token"], both["count"]), length, begin, counter.settings, out)
        out.write("starts", np.array([begin], dtype="<u8"))
    for run in runs:
        run.unlink()
    return files


class _Writers:
    """Open files by name."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = {name: path.open("wb") for name, path in files.items()}

    def __enter__(self) -> _Writers:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def write(self, name: str, values: NDArray[Any]) -> None:
        self._files[name].write(values.tobytes())


def _write_part(records: NDArray[Any], length: int, begin: int, settings: Settings, out: _Writers) -> int:
    """Contexts with their followers, rare ones dropped, most frequent first. → where the next context's followers begin"""
    records = records[np.lexsort((records["token"], -records["count"].astype(np.int64), records["key"]))]
    first = np.ones(len(records), dtype=bool)
    first[1:] = records["key"][1:] != records["key"][:-1]
    at = np.flatnonzero(first)
    totals = np.add.reduceat(records["count"].astype(np.uint64), at)
    distinct = np.diff([*at, len(records)])
    rank = np.arange(len(records)) - np.repeat(at, distinct)
    kept = rank < settings.followers
    if length > 1:
        kept &= records["count"] >= settings.min_count
    per_context = np.add.reduceat(kept.astype(np.int64), at)
    useful = per_context > 0
    starts = begin + np.concatenate([[0], np.cumsum(per_context[useful])[:-1]]) if useful.any() else np.zeros(0)
    most = np.uint64(2**32 - 1)
    out.write("keys", records["key"][at][useful].astype("<u8"))
    out.write("starts", starts.astype("<u8"))
    out.write("totals", np.minimum(totals[useful], most).astype("<u4"))
    out.write("distinct", distinct[useful].astype("<u4"))
    out.write("tokens", records["token"][kept].astype("<u4"))
    out.write("counts", records["count"][kept].astype("<u4"))
    return begin + int(kept.sum())
