"""An n-gram table in one file, mapped into memory: who follows which context, and how often.

Contexts are known by a 64-bit hash of their tokens. Two contexts that share a hash share their counts, which costs a little
acceptance at odds of 1e-5 for ten million contexts and can't bend the law: the probabilities are those of this table.

Probabilities are interpolated (Witten and Bell 1991): after a context seen N times with U different followers,

    P_n(x) = c(x) / (N + U) + (1 - K / (N + U)) · P_{n-1}(x),

where K is the sum of the counts that were kept (rare followers may have been dropped: their mass goes to the shorter
contexts). P_1 is the share of the token in the corpus, every token counted a little.

Behind all arrays stands a digest of them: what tells a table from others (`NgramTable.digest`).
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ModelError
from outrider.support.whole_files import replacing

MAGIC = b"outrider-ngram-1\n"
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_BITS = 2**64 - 1
_DIGEST = 16  # bytes
_SMOOTHING = 0.5  # counted for every token of the vocabulary
ARRAYS = ("keys", "starts", "totals", "distinct", "tokens", "counts")
_TYPES = {"keys": "<u8", "starts": "<u8", "totals": "<u4", "distinct": "<u4", "tokens": "<u4", "counts": "<u4"}


def context_hashes(tokens: NDArray[Any], length: int) -> NDArray[np.uint64]:
    """A hash of each window of `length` tokens. [T] → uint64 [T - length + 1]"""
    count = max(len(tokens) - length + 1, 0)
    out = np.full(count, length, dtype=np.uint64)
    ids = tokens.astype(np.uint64)
    with np.errstate(over="ignore"):
        for i in range(length):
            out = (out ^ (ids[i : i + count] + np.uint64(1))) * _MULTIPLIER
            out ^= out >> np.uint64(29)
    return out


def context_hash(context: Many[int]) -> int:
    """The hash of one window, in plain integers: a tenth of the time that arrays of one element take."""
    out = len(context)
    for token in context:
        out = (out ^ (int(token) + 1)) * int(_MULTIPLIER) & _BITS
        out ^= out >> 29
    return out


@dataclass(frozen=True)
class Level:
    """The contexts of one length.

    keys: sorted hashes. starts: where each context's followers begin, one more at the end. totals, distinct: N and U above.
    tokens, counts: the followers kept, most frequent first.
    """

    keys: NDArray[Any]
    starts: NDArray[Any]
    totals: NDArray[Any]
    distinct: NDArray[Any]
    tokens: NDArray[Any]
    counts: NDArray[Any]

    def find(self, key: int) -> int:
        """The index of a context, by its hash; -1 if it was not seen."""
        at = int(self.keys.searchsorted(np.uint64(key)))
        return at if at < len(self.keys) and self.keys[at] == key else -1


class NgramTable:
    """order: the longest n-gram. vocab_size, tokenizer: what it was counted for. tokens_seen: the corpus.

    digest: of a table that is read, if its file has one.
    """

    def __init__(
        self, header: dict[str, Any], unigrams: NDArray[Any], levels: list[Level], digest: bytes | None = None
    ) -> None:
        self.vocab_size = int(header["vocab_size"])
        self.tokenizer = str(header["tokenizer"])
        self.tokens_seen = int(header["tokens_seen"])
        self.levels = levels
        self._unigrams, self._digest = unigrams, digest
        counts = unigrams.astype(np.float64) + _SMOOTHING
        self.unigram: NDArray[np.float64] = counts / counts.sum()
        self._best = int(self.unigram.argmax())

    @property
    def order(self) -> int:
        return len(self.levels) + 1

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of all that was counted: two tables that differ have others.

        Of a file written without one, or of arrays that were never in a file, it is computed when it is first asked for: a
        second a gigabyte.
        """
        if self._digest is not None:
            return self._digest
        found = _hash()
        found.update(self._unigrams.astype("<u8").tobytes())
        for level in self.levels:
            for name in ARRAYS:
                found.update(np.ascontiguousarray(getattr(level, name), dtype=_TYPES[name]).data.cast("B"))
        return found.digest()

    def cut(self, order: int) -> NgramTable:
        """The same without n-grams longer than `order`. Its digest is that of the whole."""
        shorter = copy.copy(self)
        shorter.levels, shorter._digest = self.levels[: order - 1], self.digest
        return shorter

    def law(self, context: Many[int]) -> NDArray[np.float64]:
        """The distribution after these tokens (the last order - 1 of them count). → float64 [V]"""
        law = self.unigram.copy()
        for length, level in enumerate(self.levels, 1):
            at = self._find(context, length)
            if at < 0:
                break  # a longer context was not seen either
            followers = slice(int(level.starts[at]), int(level.starts[at + 1]))
            shares = level.counts[followers] / (float(level.totals[at]) + float(level.distinct[at]))
            law *= 1.0 - shares.sum()
            law[level.tokens[followers]] += shares
        return law

    def best(self, context: Many[int]) -> int:
        """The most frequent follower of the longest context seen: the table's guess, in a few microseconds."""
        for length in range(min(len(self.levels), len(context)), 0, -1):
            at = self._find(context, length)
            if at >= 0:
                level = self.levels[length - 1]
                if level.starts[at] < level.starts[at + 1]:
                    return int(level.tokens[level.starts[at]])
        return self._best

    def depth(self, context: Many[int]) -> int:
        """The length of the longest context that was seen."""
        for length in range(min(len(self.levels), len(context)), 0, -1):
            if self._find(context, length) >= 0:
                return length
        return 0

    def _find(self, context: Many[int], length: int) -> int:
        if len(context) < length:
            return -1
        return self.levels[length - 1].find(context_hash(context[len(context) - length :]))


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST)


def write_table(
    path: Path, vocab_size: int, tokenizer: str, tokens_seen: int, unigrams: NDArray[Any], levels: list[dict[str, Path]]
) -> None:
    """Put the arrays (raw files by name, per level) behind a header, in a file that appears whole or not at all."""
    sizes = [{name: files[name].stat().st_size for name in ARRAYS} for files in levels]
    header = {"vocab_size": vocab_size, "tokenizer": tokenizer, "tokens_seen": tokens_seen, "levels": sizes}
    text = json.dumps(header).encode()
    text += b" " * (-(len(MAGIC) + len(text) + 1) % 8) + b"\n"
    found, counted = _hash(), unigrams.astype("<u8").tobytes()
    found.update(counted)
    with replacing(path) as out:
        out.write(MAGIC + text)
        out.write(counted)
        for files in levels:
            for name in ARRAYS:
                with files[name].open("rb") as part:
                    while block := part.read(1 << 24):
                        found.update(block)
                        out.write(block)
                out.write(b"\0" * (-files[name].stat().st_size % 8))
        out.write(found.digest())


def read_table(path: Path) -> NgramTable:
    """Map a file written by `write_table`."""
    try:
        with path.open("rb") as file:
            magic, line = file.read(len(MAGIC)), file.readline()
    except OSError as error:
        raise ModelError(f"n-gram table {path} can't be read ({error.strerror}): check the path") from None
    try:
        if magic != MAGIC:
            raise ValueError("wrong first line")
        header = json.loads(line)
        at = len(MAGIC) + len(line)
        data = np.memmap(path, mode="r", dtype=np.uint8)
        unigrams, at = _array(data, at, 8 * int(header["vocab_size"]), "<u8")
        levels = []
        for sizes in header["levels"]:
            arrays = {}
            for name in ARRAYS:
                arrays[name], at = _array(data, at, int(sizes[name]), _TYPES[name])
            levels.append(Level(**arrays))
        digest = data[at : at + _DIGEST].tobytes()  # shorter in a file of an earlier version
        return NgramTable(header, unigrams, levels, digest if len(digest) == _DIGEST else None)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"n-gram table {path} is damaged or of another version ({error}): train it anew") from None


def _array(data: NDArray[Any], at: int, size: int, dtype: str) -> tuple[NDArray[Any], int]:
    if at + size > len(data):
        raise ValueError("the file is too short")
    # A plain view: of the class for mapped files, every look at an element makes an object of it.
    return data[at : at + size].view(np.ndarray).view(dtype), at + size + -size % 8
