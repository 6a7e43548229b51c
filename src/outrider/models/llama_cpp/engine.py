"""llama.cpp as a `LanguageModel`: a context for every sequence, roll-back by position, logits that are not copied.

Weights stay quantized as the file has them. A pass of n tokens costs nearly n passes of one, so rows are scored one after
the other, at little loss; but not evenly, so they are padded to the widths that measure well (`costs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.models.base import Sequence, WhichLogits, represented
from outrider.models.engine_checks import check_truncate, new_tokens, owned_sequences
from outrider.models.llama_cpp.library import BATCH, OUTPUTS, Context, Weights
from outrider.models.weights.gguf import fingerprint
from outrider.models.weights.gguf_tensors import GgufTensor, gguf_tensors, mapped

FIRST_CELLS = 1024
SPARE = 2  # contexts kept for sequences to come
SAME_BITS = ("Q4_0", "Q4_1", "Q8_0")  # types whose kernels give the same bits in any width (docs/engines.md)


def have_same_bits(read: Iterable[GgufTensor]) -> bool:
    """Whether a pass that reads these has: files of such a type often have a head of another one."""
    from gguf.constants import GGMLQuantizationType

    return all(GGMLQuantizationType(tensor.kind).name in SAME_BITS for tensor in read if len(tensor.shape) > 1)


class LlamaSequence:
    """A sequence of tokens in a context of its own. The cells of tokens taken back are freed by the next pass."""

    def __init__(self, model: LlamaCppModel, context: Context) -> None:
        self.model = model
        self.context = context
        self.length = 0
        self.closed = False

    def truncate(self, length: int) -> None:
        check_truncate(length, self.length)
        self.length = length

    def close(self) -> None:
        self.model.release(self)


class LlamaCppModel:
    """A GGUF file opened by llama.cpp. Not safe for concurrent use by several threads.

    The logits that `score` returns are overwritten by the next call.
    """

    flat = True

    def __init__(self, path: Path, tokenizer: Any = None) -> None:
        self._path = path
        self._weights = Weights(path)
        kind = self._weights.entry("general.architecture")
        if not self._weights.decoder_only:
            raise ModelError(f"{path.name} ({kind}) can't be used: it is not a decoder-only language model")
        if not self._weights.forgets:
            raise ModelError(
                f"{path.name} ({kind}) can't be used: its recurrent state can't be rolled back, and speculation discards "
                "rejected tokens; use engine transformers, if it reads this file, or a model with attention in every layer"
            )
        self.tokenizer = tokenizer
        self.threads = torch.get_num_threads()
        self._spare: list[Context] = [Context(self._weights, min(FIRST_CELLS, self.max_length), self.threads)]
        self._width: Callable[[int, int], int] = lambda tokens, context: tokens  # noqa: ARG005

    def __repr__(self) -> str:
        return represented(self)

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

    @cached_property
    def same_bits(self) -> bool:
        """Whether a token's logits have the same bits in a pass of any width."""
        return have_same_bits(self._read())

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
        """Bytes of weights that a pass of one token reads."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        sizes = [(prod(tensor.shape), *GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]) for tensor in self._read()]
        return sum(count // block * size for count, block, size in sizes)

    def _read(self) -> list[GgufTensor]:
        """What a pass reads: the table of embeddings only if it is the head, too."""
        with mapped(self._path) as data:
            found = gguf_tensors(data, self._path.name)
        has_head = any(tensor.name == "output.weight" for tensor in found)
        return [tensor for tensor in found if not (has_head and tensor.name == "token_embd.weight")]

    def pad_widths(self, width: Callable[[int, int], int]) -> None:
        """From now on score n tokens of one sequence as width(n, context) ≥ n, where that is quicker (`costs`)."""
        self._width = width

    def open(self, reserve: int = 0) -> LlamaSequence:
        cells = min(max(reserve, FIRST_CELLS), self.max_length)
        fitting = [context for context in self._spare if context.cells >= cells]
        if not fitting:
            return LlamaSequence(self, Context(self._weights, cells, self.threads))
        self._spare.remove(fitting[0])
        fitting[0].cut(0)
        return LlamaSequence(self, fitting[0])

    def release(self, sequence: LlamaSequence) -> None:
        """Keep a sequence's context for another one, or give it back."""
        if not sequence.closed:
            sequence.closed = True
            self._spare = [*self._spare, sequence.context][-SPARE:]

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        new = new_tokens(sequences, tokens, lengths, self.vocab_size)
        rows = owned_sequences(self, LlamaSequence, sequences, lengths, tokens.shape[1])
        found = [self._score(row, part, logits) for row, part in zip(rows, new, strict=True)]
        if logits == "none":
            return None
        if len(found) == 1:
            return _padded(found[0], tokens.shape[1] if logits == "all" else 1).unsqueeze(0)
        return torch.stack([_padded(one, tokens.shape[1] if logits == "all" else 1) for one in found])

    def _score(self, row: LlamaSequence, tokens: list[int], logits: WhichLogits) -> Tensor:
        """Score one row, as wide as is quickest. → [kept, V]"""
        count = len(tokens)
        width = min(self._width(count, row.length), self.max_length - row.length)
        row.context.cut(row.length)
        self._reserve(row, row.length + width)
        keep = [logits == "all" or (logits == "last" and i == count - 1) for i in range(count)] + [False] * (width - count)
        found, start = [], 0
        tokens = tokens + [0] * (width - count)
        while start < width:
            end = min(width, start + (OUTPUTS if logits == "all" else BATCH))
            made = row.context.decode(tokens[start:end], row.length + start, keep[start:end])
            found.append(made if end == width else made.copy())
            start = end
        row.length += count
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))

    def _reserve(self, row: LlamaSequence, cells: int) -> None:
        """A context of at least that many cells, into which the old one's are moved."""
        if cells > row.context.cells:
            larger = Context(self._weights, min(max(cells, 2 * row.context.cells), self.max_length), self.threads)
            if row.length:
                larger.take_over(row.context)
            row.context = larger


def _padded(found: Tensor, width: int) -> Tensor:
    """Rows of zeros behind those that were kept. [kept, V] → [width, V]"""
    short = width - len(found)
    return found if short <= 0 else torch.nn.functional.pad(found, (0, 0, 0, short))
