"""A model whose law is written down: logits looked up by the last tokens. For exact tests and simulated costs."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from outrider.errors import ModelError, ParameterError
from outrider.models.base import Sequence, WhichLogits
from outrider.models.engine_checks import check_alternative, check_copy, check_places, check_truncate
from outrider.support.device_data import index


class TableSequence:
    """Holds its own tokens, so that a wrong roll-back shows in what the model says next."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.beside: list[int] = []  # the alternatives of the last pass

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        check_truncate(length, self.length)
        del self.tokens[length:]

    def close(self) -> None:
        self.tokens.clear()


class TableModel:
    """A Markov model of any order over a small vocabulary.

    probs: [V, …, V], order + 1 dimensions; probs[a, b, x] is the probability of x after … a, b. A context shorter than
    the order is filled with token 0 on the left.
    seconds_per_call, seconds_per_token: a simulated cost, slept for; scoring n tokens costs call + n × token.
    """

    def __init__(
        self,
        probs: Tensor,
        name: str = "table",
        max_length: int | None = None,
        seconds_per_call: float = 0.0,
        seconds_per_token: float = 0.0,
    ) -> None:
        if probs.dim() < 1 or any(size != probs.shape[-1] for size in probs.shape):
            raise ModelError(f"probs of a table model must be [V, …, V], got {list(probs.shape)}")
        self._probs = probs
        self._order = probs.dim() - 1
        self._rows = probs.reshape(-1, probs.shape[-1])  # by context, the oldest token first
        self._name = name
        self._max_length = max_length
        self._cost = (seconds_per_call, seconds_per_token)

    @property
    def name(self) -> str:
        return self._name

    @property
    def vocab_size(self) -> int:
        return self._probs.shape[-1]

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def device(self) -> torch.device:
        return self._probs.device

    def open(self, reserve: int = 0) -> TableSequence:
        del reserve
        return TableSequence()

    def copy_prefix(self, source: Sequence, target: Sequence, length: int) -> None:
        """See `CopiesPrefixes`."""
        check_copy(source, target, length)
        if not isinstance(source, TableSequence) or not isinstance(target, TableSequence):
            raise ParameterError(f"sequences must have been opened by {self.name}")
        target.tokens += source.tokens[target.length : length]

    def probs_after(self, tokens: Many[int]) -> Tensor:
        """The law of the next token. [V]"""
        return self._rows[self._row_after(tokens)]

    def _row_after(self, tokens: Many[int]) -> int:
        row = 0
        for token in tokens[-self._order :] if self._order else ():
            if not 0 <= token < self.vocab_size:  # it would mean the row of another context
                raise ParameterError(f"tokens must be in 0 … {self.vocab_size - 1}, got {token}")
            row = row * self.vocab_size + token
        return row

    def score(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits = "all"
    ) -> Tensor | None:
        self._wait(self._cost[0] + self._cost[1] * max(lengths))
        contexts: list[int] = []  # each position's, as a row of the table
        places: list[int] = []
        for i, (sequence, row, length) in enumerate(zip(sequences, tokens.tolist(), lengths, strict=True)):
            if not isinstance(sequence, TableSequence):
                raise ParameterError(f"sequences must have been opened by {self.name}, got {type(sequence).__name__}")
            sequence.beside = []
            for j, token in enumerate(row[:length]):
                sequence.tokens.append(token)
                contexts.append(self._row_after(sequence.tokens))
                places.append(i * tokens.shape[1] + j)
        if logits == "none":
            return None
        out = self._probs.new_zeros(tokens.numel(), self.vocab_size)
        out[index(places, self.device)] = self._rows[index(contexts, self.device)].log()
        out = out.view(*tokens.shape, self.vocab_size)
        if logits == "last":
            return out[torch.arange(len(out)), torch.tensor(lengths) - 1].unsqueeze(1)
        return out

    @staticmethod
    def _wait(seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    scores_alternatives = True

    def score_beside(
        self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], others: Tensor, places: Many[Many[int]]
    ) -> Tensor:
        """See `ScoresAlternatives`."""
        check_places(lengths, others, places)
        self._wait(self._cost[1] * max(map(len, places)))
        appended = self.score(sequences, tokens, lengths)
        assert appended is not None
        width = max(count + len(own) for count, own in zip(lengths, places, strict=True))
        out = self._probs.new_zeros(len(lengths), width, self.vocab_size)
        for i, (sequence, row, own) in enumerate(zip(sequences, others.tolist(), places, strict=True)):
            assert isinstance(sequence, TableSequence)  # `score` has looked
            sequence.beside = row[: len(own)]
            first = sequence.length - lengths[i]
            out[i, : lengths[i]] = appended[i, : lengths[i]]
            for m, place in enumerate(own):
                out[i, lengths[i] + m] = self.probs_after([*sequence.tokens[: first + place], row[m]]).log()
        return out

    def take_alternative(self, sequence: Sequence, position: int, m: int) -> None:
        """See `ScoresAlternatives`."""
        assert isinstance(sequence, TableSequence)
        check_alternative(position, m, sequence.length, len(sequence.beside))
        sequence.tokens[position:] = [sequence.beside[m]]
        sequence.beside = []
