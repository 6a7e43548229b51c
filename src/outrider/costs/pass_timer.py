"""Passes of a model timed one by one: what cost tables and predictions are made of."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.draft_steps.own_tokens import OwnTokens
from outrider.draft_steps.steps import Wanted, steps_on
from outrider.kernels.sampling import reading
from outrider.models.base import LanguageModel, Sequence, has_encoder, has_few_tokens, open_sequence
from outrider.proposal import DraftRow
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings, greedy_tokens
from outrider.support.device_data import pad_rows

_GREEDY = SamplingSettings()


@runtime_checkable
class Advances(Protocol):
    """A sequence that can pretend to hold tokens, so that long contexts are timed without reading one."""

    def advance(self, count: int) -> None: ...


@runtime_checkable
class KeepsWidth(Protocol):
    """An engine whose passes cost more when their width changes, and that keeps it, therefore, where it can."""

    def keep_width(self, on: bool) -> None: ...


@runtime_checkable
class Follows(Protocol):
    """A model whose passes come after another's, which leaves the caches full of its own weights: a pass on its own would
    seem twice as quick as it is in a round.
    """

    @property
    def leader(self) -> LanguageModel:
        """The other one."""


@runtime_checkable
class Rides(Protocol):
    """One of these whose sequences read what the other model's keep. goes_on: and go on by what they made themselves."""

    goes_on: bool

    def open_on(self, base: Sequence | None, reserve: int = 0) -> Sequence:
        """One that reads what that sequence of the other one keeps."""


class PassTimer:
    """Times passes of a model after a context, one by one; to be used in `with`.

    sizes: tokens of each of so many rows, those left out that the model's context does not allow. context: tokens held
    before; engines that can't pretend to hold them read them. Where a change of the width costs something, it is left out,
    and every pass is as wide as it is asked for. changed: the seconds of the passes after such changes, by their size.

    What rides on another model's sequences does so here: it reads the other one's states after a pass of that one, and its
    own in passes that follow.
    """

    def __init__(self, model: LanguageModel, sizes: Iterable[int], context: int, rows: int = 1) -> None:
        self.model = model
        limit = model.max_length
        self.sizes = tuple(n for n in sizes if limit is None or context + n <= limit) or (1,)
        self._context = context
        self._rows = rows
        self._sequences: list[Sequence] = []
        self._width = 0
        self._leader = model.leader if isinstance(model, Follows) else None
        self._lead: Sequence | None = None
        self.changed: dict[int, list[float]] = {}

    def __enter__(self) -> PassTimer:
        model, context = self.model, self._context
        if isinstance(model, KeepsWidth):
            model.keep_width(False)
        try:
            if self._leader is not None:
                self._lead = self._leader.open()
            for _ in range(self._rows):
                sequence = self._open(context + max(self.sizes))
                self._sequences.append(sequence)
                if isinstance(sequence, Advances):
                    sequence.advance(context)
                else:
                    tokens, lengths = pad_rows([[i % model.vocab_size for i in range(context)]], model.device)
                    model.score([sequence], tokens, lengths, "none")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:  # whatever one of them raises, the others are closed, those behind another one first
            if isinstance(self.model, KeepsWidth):
                stack.callback(self.model.keep_width, True)
            for sequence in (self._lead, *self._sequences):
                if sequence is not None:
                    stack.callback(sequence.close)

    @property
    def _rides(self) -> bool:
        """Whether sequences are opened on the other model's, which can pretend to hold as many tokens."""
        limit = None if self._leader is None else self._leader.max_length
        fits = limit is None or self._context + max(self.sizes) <= limit
        return fits and isinstance(self.model, Rides) and self.model.goes_on and isinstance(self._lead, Advances)

    def _open(self, reserve: int) -> Sequence:
        model: Any = self.model
        found: Sequence = model.open_on(self._lead, reserve) if self._rides else _open(model, reserve)
        return found

    def time(self, size: int, again: bool = False) -> float:
        """Seconds to score that many new tokens of each row and to choose a token after each.

        again: right after another pass of this model, and not after one of the model that it follows.

        What a round does with the logits belongs to its cost: on a small model it is several per cent.
        """
        model = self.model
        new, count = pad_rows([[i % model.vocab_size for i in range(size)]] * self._rows, model.device)
        if size != self._width and isinstance(model, KeepsWidth):
            start = time.perf_counter()
            self._pass(new, count)
            self.changed.setdefault(size, []).append(time.perf_counter() - start)
            self._take_back()
        self._width = size
        if not again:
            self._take_back()
            self._follow(size)
        _synchronise(model)
        start = time.perf_counter()
        self._pass(new, count)
        took = time.perf_counter() - start
        if not self._rides:  # else the next one may go on from here
            self._take_back()
        return took

    @property
    def follows(self) -> bool:
        """Whether passes of another model come between."""
        return self._leader is not None

    def _follow(self, size: int) -> None:
        """Let the other model score a token, as it does in every round; it holds all but the newest token then."""
        lead = self._lead
        if self._leader is None or lead is None:
            return
        held = self._context + size - 1 if self._rides else 0
        lead.truncate(min(lead.length, held))
        if isinstance(lead, Advances):
            lead.advance(held - lead.length)
        self._leader.score([lead], *pad_rows([[0]], self._leader.device), "all")
        lead.truncate(held)

    def _pass(self, new: Tensor, count: list[int]) -> None:
        if self._rides:
            return self._draft(new, count)
        # As a draft is asked: over its own tokens alone if it has few; and what drafts only, for what follows all of them.
        score = self.model.score_few if has_few_tokens(self.model) else self.model.score
        last = new.shape[1] == 1 or self._leader is not None
        logits = score(self._sequences, new, count, "last" if last else "all")
        assert logits is not None
        kernels = reading(logits)
        if kernels is not None:
            kernels.calls.step(logits.reshape(-1, logits.shape[-1]), _GREEDY.law)
        else:
            greedy_tokens(logits, _GREEDY).tolist()  # waits for the device, too
        return None

    def _draft(self, new: Tensor, count: list[int]) -> None:
        """As a token is drafted, with what is read of it: .1 of .35 ms of a small head (EXPERIMENTS.md)."""
        own = OwnTokens.of(self.model, self.model.vocab_size, _GREEDY)
        logits = own.score(self._sequences, new, count)
        active = list(range(self._rows))
        steps = steps_on(logits, own, [DraftRow([0], 1, RandomStream(0), each) for each in self._sequences], _GREEDY)
        steps.draw(logits, active, Wanted(True, 0))
        steps.newest(active)

    def _take_back(self) -> None:
        for sequence in self._sequences:
            sequence.truncate(self._context)


def can_pretend(model: LanguageModel) -> bool:
    """Whether long contexts can be timed. Reading one of 2,048 tokens can take longer than all else that is timed,
    and attention adds much the same share to passes of all sizes.
    """
    sequence = _open(model)
    try:
        return isinstance(sequence, Advances)
    finally:
        sequence.close()


def _open(model: LanguageModel, reserve: int = 0) -> Sequence:
    return open_sequence(model, model.stand_in() if has_encoder(model) else None, reserve)


def _synchronise(model: LanguageModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
