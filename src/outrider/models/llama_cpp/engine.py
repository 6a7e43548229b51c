"""llama.cpp as a `LanguageModel`: several sequences in one pass, roll-back by position, logits that are not copied.

Weights stay quantised as the file has them. A pass of n tokens costs nearly n passes of one, but not evenly, so single
sequences are padded to the widths that measure well (`costs`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelError, ParameterError
from outrider.models.base import Sequence, WhichLogits, check_score, check_truncate
from outrider.models.gguf import fingerprint
from outrider.models.llama_cpp.library import BATCH, MOST_SEQUENCES, OUTPUTS, Context, Weights

FIRST_CELLS = 1024


class _Place(NamedTuple):
    """A token of a pass: where it stands, whose it is, and whether the logits after it are wanted."""

    token: int
    position: int
    slot: int
    keep: bool


class LlamaSequence:
    """A sequence of tokens in the model's cache. The cells of tokens taken back are freed by the next pass."""

    def __init__(self, model: LlamaCppModel, slot: int, reserve: int) -> None:
        self.model = model
        self.slot = slot
        self.reserve = reserve
        self.length = 0
        self.held = 0  # cells in use: more than `length` until the next pass

    def truncate(self, length: int) -> None:
        check_truncate(length, self.length)
        self.length = length

    def close(self) -> None:
        self.model.release(self)


class LlamaCppModel:
    """A GGUF file opened by llama.cpp. Not safe for concurrent use by several threads.

    The logits that `score` returns are overwritten by the next call.
    """

    def __init__(self, path: Path, tokenizer: Any = None, threads: int | None = None) -> None:
        self._path = path
        self._weights = Weights(path)
        kind = self._weights.entry("general.architecture")
        if not self._weights.decoder_only:
            raise ModelError(f"{path.name} ({kind}) can't be used: it is not a decoder-only language model")
        if not self._weights.forgets:
            raise ModelError(
                f"{path.name} ({kind}) can't be used: its recurrent state can't be rolled back, and speculation discards "
                "rejected tokens; use a model with attention in every layer"
            )
        self.tokenizer = tokenizer
        self.threads = threads or torch.get_num_threads()
        self._context = Context(self._weights, min(FIRST_CELLS, self.max_length), 1, self.threads)
        self._open: dict[int, LlamaSequence] = {}
        self._width: Callable[[int, int], int] = lambda tokens, context: tokens  # noqa: ARG005

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def vocab_size(self) -> int:
        return self._weights.vocab_size

    @property
    def max_length(self) -> int:
        return self._weights.max_length

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype_name(self) -> str:
        """The file's mixture of types, "Q4_K_M" say."""
        from gguf import LlamaFileType

        number = self._weights.entry("general.file_type")
        return LlamaFileType(int(number)).name.removeprefix("MOSTLY_") if number.isdigit() else "gguf"

    @property
    def end_tokens(self) -> frozenset[int]:
        """The end of a text and the end of a turn."""
        return self._weights.end_tokens

    @property
    def fingerprint(self) -> str:
        """What the costs of a pass depend on, the machine apart."""
        import llama_cpp

        return f"llama.cpp {llama_cpp.__version__} {fingerprint(self._path)} {self.threads}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of one token reads: the table of embeddings only if it is the head, too."""
        from gguf import GGUFReader

        sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(self._path).tensors}
        return sum(sizes.values()) - (sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0)

    def pad_widths(self, width: Callable[[int, int], int]) -> None:
        """From now on score n tokens of one sequence as width(n, context) ≥ n, where that is quicker (`costs`)."""
        self._width = width

    def open(self, reserve: int = 0) -> LlamaSequence:
        free = (slot for slot in range(MOST_SEQUENCES) if slot not in self._open)
        slot = next(free, None)
        if slot is None:
            raise ModelError(f"{self.name}: llama.cpp holds {MOST_SEQUENCES} sequences at most: generate fewer at once")
        sequence = LlamaSequence(self, slot, min(reserve, self.max_length))
        self._reserve(sequence.reserve, slot + 1)
        self._open[slot] = sequence
        return sequence

    def release(self, sequence: LlamaSequence) -> None:
        """Free a sequence's cells."""
        if self._open.get(sequence.slot) is sequence:
            self._cut(sequence, 0)
            del self._open[sequence.slot]

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        rows = self._own(sequences, tokens, lengths)
        new = [row[:count] for row, count in zip(tokens.tolist(), lengths, strict=True)]
        if len(rows) == 1:  # rows side by side are wide already
            width = min(self._width(len(new[0]), rows[0].length), self.max_length - rows[0].length)
            new[0] += [0] * (width - len(new[0]))
        for row in rows:
            self._cut(row, row.length)
        self._reserve(max(row.length + len(part) for row, part in zip(rows, new, strict=True)))
        flat = [
            _Place(
                token, row.length + i, row.slot, (i < count) if logits == "all" else (logits == "last" and i == count - 1)
            )
            for row, part, count in zip(rows, new, lengths, strict=True)
            for i, token in enumerate(part)
        ]
        for row, part in zip(rows, new, strict=True):
            row.held += len(part)
        found = self._passes(flat)
        for row, count in zip(rows, lengths, strict=True):
            row.length += count
        if logits == "none":
            return None
        if logits == "last":
            return found.unsqueeze(1)
        if set(lengths) == {tokens.shape[1]}:
            return found.view(len(rows), tokens.shape[1], -1)
        return _spread(found, lengths, tokens.shape[1])

    def _passes(self, flat: list[_Place]) -> Tensor:
        """All tokens, in as many passes as they need. → [kept, V]"""
        parts = _parts(flat)
        found = []
        for part in parts:
            logits = self._context.decode(*zip(*part, strict=True))
            found.append(logits if len(parts) == 1 else logits.copy())
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))

    def _cut(self, row: LlamaSequence, length: int, context: Context | None = None) -> None:
        if row.held > length:
            (context or self._context).cut(row.slot, length)
            row.held = length

    def _reserve(self, cells: int, sequences: int = 1) -> None:
        """A cache of that many tokens for each of that many sequences, at least; what the old one holds is moved along."""
        old = self._context
        if cells <= old.cells and sequences <= old.sequences:
            return
        cells = old.cells if cells <= old.cells else min(max(cells, 2 * old.cells), self.max_length)
        sequences = old.sequences if sequences <= old.sequences else min(2 * sequences, MOST_SEQUENCES)
        self._context = Context(self._weights, cells, sequences, self.threads)
        for row in self._open.values():
            self._cut(row, row.length, old)
            if row.length:
                self._context.copy_sequence(old, row.slot)

    def _own(self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int]) -> list[LlamaSequence]:
        if not len(sequences) == len(set(map(id, sequences))) == len(lengths) == len(tokens):
            raise ParameterError("sequences must be different ones, with a row of tokens and a length for each")
        rows = []
        for sequence in sequences:
            if not isinstance(sequence, LlamaSequence) or self._open.get(sequence.slot) is not sequence:
                raise ParameterError(f"sequences must be open sequences of {self.name}, got {sequence!r}")
            rows.append(sequence)
        check_score(self.name, self.max_length, rows, lengths, tokens.shape[1])
        for row, count in zip(tokens, lengths, strict=True):
            low, high = int(row[:count].min()), int(row[:count].max())
            if low < 0 or high >= self.vocab_size:
                raise ParameterError(f"tokens must be in 0 … {self.vocab_size - 1}, got {low} … {high}")
        return rows


def _parts(flat: list[_Place]) -> list[list[_Place]]:
    """Cut into passes that llama.cpp takes."""
    parts: list[list[_Place]] = [[]]
    kept = 0
    for place in flat:
        if len(parts[-1]) == BATCH or (place.keep and kept == OUTPUTS):
            parts.append([])
            kept = 0
        parts[-1].append(place)
        kept += place.keep
    return parts


def _spread(found: Tensor, lengths: Many[int], width: int) -> Tensor:
    """The rows' logits side by side. [Σ lengths, V] → [R, N, V]"""
    out = found.new_zeros(len(lengths), width, found.shape[-1])
    for row, part in zip(out, torch.split(found, list(lengths)), strict=True):
        row[: len(part)] = part
    return out
