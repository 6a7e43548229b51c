"""A head along a text that is known."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from outrider.heads.engine import HeadModel, HeadSequence
from outrider.models.base import Sequence, WhichLogits


class ReadingModel:
    """Target and head together, to have the head's laws along a known text: scores the text by both (`forced`)."""

    def __init__(self, head: HeadModel) -> None:
        self._head = head
        self.name, self.vocab_size, self.device = head.name, head.vocab_size, head.device

    @property
    def max_length(self) -> int | None:
        return self._head.target.max_length

    def open(self, reserve: int = 0) -> _Pair:
        base = self._head.target.open(reserve)
        return _Pair(base, self._head.open_on(base, reserve))

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        pairs = [sequence for sequence in sequences if isinstance(sequence, _Pair)]
        self._head.target.score([pair.base for pair in pairs], tokens, lengths, "none")
        return self._head.score([pair.own for pair in pairs], tokens, lengths, logits)


@dataclass
class _Pair:
    base: Sequence
    own: HeadSequence

    @property
    def length(self) -> int:
        return self.own.length

    def truncate(self, length: int) -> None:
        self.own.truncate(length)
        self.base.truncate(length)

    def close(self) -> None:
        self.own.close()
        self.base.close()
