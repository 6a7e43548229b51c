"""Drafting a token after another: what each step draws, by which laws, and what it tells of them.

On a CPU, where logits become laws as they are, a step is one call of our kernels, and tokens are numbers. Otherwise a step
is torch's operations, and tokens stay on the device: nothing is read back unless somebody asks how sure the draft was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.draft_steps.own_tokens import OwnTokens
from outrider.draft_steps.signals import EDGES, LEAST_LIKELY, MOST_OTHERS, shares_of, token_signals
from outrider.kernels.calls import SamplingCalls
from outrider.kernels.sampling import reading
from outrider.proposal import DraftRow, races_of
from outrider.sampling import SamplingSettings, draw_each, greedy_tokens, standardize
from outrider.support.device_data import index


@dataclass(frozen=True)
class Read:
    """How sure the draft was of one row's token, and what it might have said instead, with probabilities, if asked for."""

    signal: int
    others: list[tuple[int, float]]


@dataclass(frozen=True)
class Wanted:
    """What is to be read of a step. others: how many, None for all that are likely."""

    signals: bool
    others: int | None


class Steps(ABC):
    """The drafts of some rows, as far as they go. A step is of the `active` rows alone, by their places among all."""

    def __init__(self, own: OwnTokens, rows: Many[DraftRow], sampling: SamplingSettings) -> None:
        self._own = own
        self._rows = rows
        self._sampling = sampling

    @abstractmethod
    def draw(self, logits: Tensor, active: list[int], wanted: Wanted) -> dict[int, Read | None]:
        """Draw a token of each active row. logits: [A, T]. → what was read of each, None where nothing was asked.

        A row is missing if its law is none, as far as that can be seen without a synchronisation: its draft ends before.
        """

    @abstractmethod
    def newest(self, active: list[int]) -> Tensor:
        """The token just drawn of each. → int64 [A, 1]"""

    @abstractmethod
    def so_far(self, row: int) -> list[int]:
        """All that was drawn of one row, while it is active. Reads back."""

    @abstractmethod
    def tokens(self, length: int) -> Tensor:
        """Of all rows. → int64 [R, length], on the draft's device"""

    @abstractmethod
    def laws(self, length: int) -> Tensor | None:
        """What they were drawn from, over the target's tokens. → [R, length, V]; None if they are certain"""

    @abstractmethod
    def known(self, lengths: list[int]) -> list[list[int]] | None:
        """Each row's tokens as numbers, if they are such."""


def steps_on(logits: Tensor, own: OwnTokens, rows: Many[DraftRow], sampling: SamplingSettings) -> Steps:
    """For logits like these, [A, T]."""
    kernels = reading(logits)
    if kernels is not None and sampling.as_they_are and not any(row.stream.aims for row in rows):
        return StepsInOneCall(kernels.calls, own, rows, sampling)
    return StepsOnDevice(own, rows, sampling)


class StepsInOneCall(Steps):
    """Tokens as numbers; laws in one tensor, [R, L, V], that grows."""

    _FIRST = 4

    def __init__(self, calls: SamplingCalls, own: OwnTokens, rows: Many[DraftRow], sampling: SamplingSettings) -> None:
        super().__init__(own, rows, sampling)
        self._calls = calls
        self._drawn: list[list[int]] = [[] for _ in rows]
        self._laws: Tensor | None = None
        self._made = 0

    def draw(self, logits: Tensor, active: list[int], wanted: Wanted) -> dict[int, Read | None]:
        uniforms: list[float] = []
        where: list[int] = []
        races = None
        if not self._sampling.greedy:
            where = self._room(active, logits.device)
            rows = [self._rows[i] for i in active]
            races = races_of(rows, [len(self._drawn[i]) for i in active])
            if races is None:
                uniforms = [row.stream.take(1)[0] for row in rows]
        self._made += 1
        most, least = (MOST_OTHERS, LEAST_LIKELY) if wanted.others is None else (wanted.others, 0.0)
        width, ids = self._own.vocab_size, self._own.ids
        step = self._calls.step(logits, self._sampling.law, uniforms, where, width, ids, wanted.signals, most, least, races)
        found: dict[int, Read | None] = {}
        for place, i in enumerate(active):
            token = step.tokens[place]
            if token >= 0:
                self._drawn[i].append(token)
                read = wanted.signals
                found[i] = Read(bisect_left(EDGES, step.shares[place]), step.others[place]) if read else None
        return found

    def _room(self, active: list[int], device: torch.device) -> list[int]:
        """Addresses of the laws of this step, of each active row."""
        rows, vocabulary, laws = len(self._rows), self._own.vocab_size, self._laws
        if laws is None or self._made == laws.shape[1]:
            make = torch.empty if rows == 1 else torch.zeros  # what a row does not draw from is to be nobody's NaN
            length = self._FIRST if laws is None else 2 * laws.shape[1]
            self._laws = make((rows, length, vocabulary), dtype=torch.float32, device=device)
            if laws is not None:
                self._laws[:, : self._made] = laws
            laws = self._laws
        first, length, size = laws.data_ptr(), laws.shape[1], laws.element_size()
        return [first + (i * length + self._made) * vocabulary * size for i in active]

    def newest(self, active: list[int]) -> Tensor:
        return self._tensor([[self._drawn[i][-1]] for i in active])

    def so_far(self, row: int) -> list[int]:
        return self._drawn[row]

    def tokens(self, length: int) -> Tensor:
        return self._tensor([[*drawn, *[0] * (length - len(drawn))] for drawn in self._drawn])

    def _tensor(self, values: list[list[int]]) -> Tensor:
        return index(values, self._own.model.device)  # type: ignore[arg-type]

    def laws(self, length: int) -> Tensor | None:
        return None if self._laws is None else self._laws[:, :length]

    def known(self, lengths: list[int]) -> list[list[int]] | None:
        return [drawn[:length] for drawn, length in zip(self._drawn, lengths, strict=True)]


class StepsOnDevice(Steps):
    """Tokens as tensors. -1 stands for a law that is none: on a CPU it is seen, elsewhere it is clamped, and the token is
    then rejected or reported.
    """

    def __init__(self, own: OwnTokens, rows: Many[DraftRow], sampling: SamplingSettings) -> None:
        super().__init__(own, rows, sampling)
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []

    def draw(self, logits: Tensor, active: list[int], wanted: Wanted) -> dict[int, Read | None]:
        if self._sampling.calls_back:
            logits = logits.clone()  # a processor may generate with this model, whose next pass may overwrite them
        drawn, law = self._draw(logits, active)
        lost = _without_law(drawn, active)
        # Processors never see what is lost.
        column = drawn if drawn.device.type == "cpu" and not lost else drawn.clamp(min=0)
        read = self._read(logits, column, wanted)
        self._tokens.append(_spread(self._own.tokens(column), active, len(self._rows)))
        if law is not None:
            self._probs.append(_spread(law, active, len(self._rows)))
        return {i: one for i, one in zip(active, read, strict=True) if i not in lost}

    def _draw(self, logits: Tensor, active: list[int]) -> tuple[Tensor, Tensor | None]:
        """A column a row, -1 where there is no law, and the laws [A, T]; greedy, columns are certain: no laws are made."""
        contexts = None
        rows = [self._rows[i] for i in active]
        if self._sampling.needs_context:
            contexts = [
                row.context(_context_tokens(row, [t[i] for t in self._tokens], logits.device), len(self._tokens))
                for row, i in zip(rows, active, strict=True)
            ]
        if self._sampling.greedy:
            return greedy_tokens(logits, self._sampling, contexts), None
        law = standardize(logits, self._sampling, contexts)
        streams, positions = [row.stream for row in rows], [row.position + len(self._tokens) for row in rows]
        return draw_each(law, streams, positions, self._own.ids, self._own.vocab_size), law

    def _read(self, logits: Tensor, drawn: Tensor, wanted: Wanted) -> list[Read | None]:
        """Of each active row. drawn: columns of [A, T]. Reads back."""
        if not wanted.signals:
            return [None] * len(drawn)
        if wanted.others == 0:
            return [Read(signal, []) for signal in token_signals(logits, drawn)]
        found: list[Read | None] = []
        for column, shares in zip(drawn.tolist(), shares_of(logits), strict=True):
            others = shares.others(column, wanted.others)
            names = self._own.named([other for other, _ in others])
            named = [(name, share) for name, (_, share) in zip(names, others, strict=True)]
            found.append(Read(shares.signal(column), named))
        return found

    def newest(self, active: list[int]) -> Tensor:
        tokens = _pick(self._tokens[-1], active).unsqueeze(-1)
        # A processor may ask for a token that only the target has.
        return tokens.clamp(max=self._own.model.vocab_size - 1) if self._own.whole else tokens

    def so_far(self, row: int) -> list[int]:
        return torch.stack([tokens[row] for tokens in self._tokens]).tolist()

    def tokens(self, length: int) -> Tensor:
        return torch.stack(self._tokens[:length], dim=1)

    def laws(self, length: int) -> Tensor | None:
        return self._own.laws(torch.stack(self._probs[:length], dim=1)) if self._probs else None

    def known(self, lengths: list[int]) -> None:
        del lengths


def _context_tokens(row: DraftRow, drafted: list[Tensor], device: torch.device) -> Tensor:
    known = index(row.tokens, device)
    return torch.cat([known, torch.stack(drafted)]) if drafted else known


def _without_law(drawn: Tensor, active: list[int]) -> set[int]:
    """The rows that drew -1, where looking costs nothing."""
    if drawn.device.type != "cpu":
        return set()
    return {i for i, token in zip(active, drawn.tolist(), strict=True) if token < 0}


def _spread(values: Tensor, active: list[int], rows: int) -> Tensor:
    """Put the active rows' values at their places among all rows, zeros elsewhere. [A, …] → [R, …]"""
    if len(active) == rows:
        return values
    out = values.new_zeros(rows, *values.shape[1:])
    return out.index_copy_(0, index(active, values.device), values)


def _pick(values: Tensor, active: list[int]) -> Tensor:
    """The active rows' values. [R, …] → [A, …]"""
    return values if len(active) == len(values) else values[index(active, values.device)]
