"""Models some or all of whose layers keep a state instead of keys and values: Qwen 3.5, LFM2, Granite 4, Mamba, Jamba, …

A rejected token has changed that state, so states are kept as they were after each token (`cache.recurrent_cache`), and a
sequence goes on from the one that it is rolled back to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.errors import ModelError, ParameterError, in_one_line
from outrider.models.base import Sequence, WhichLogits
from outrider.models.cache.recurrent_cache import STEPS, RecurrentCache
from outrider.models.cache.slots import SlotSequence
from outrider.models.probe import allowed, off_by, plain_logits
from outrider.models.recurrent.mixers import find_mixers
from outrider.models.recurrent.recorded import RecordedStates
from outrider.models.weights.same_bits import convolutions_alike
from outrider.support.device_data import pad_rows
from outrider.support.inference import in_inference_mode

_TOKENS = [[3, 1, 4, 2], [1], [5, 2, 6]]


@contextmanager
def _without_hints() -> Iterator[None]:
    """Transformers says once of each function that a package for GPUs would be faster."""
    log = logging.getLogger("transformers.integrations.hub_kernels")

    def other(record: logging.LogRecord) -> bool:
        return "falling back to its reference" not in record.getMessage()

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


class RecurrentSequence(SlotSequence):
    """One that knows its tokens: where no state was kept, they are scored once more."""

    def __init__(self, model: RecurrentModel, slot: int) -> None:
        super().__init__(model, slot)
        self._cache = model.recurrent_cache
        self._tokens = torch.zeros(0, dtype=torch.long, device=model.device)  # on the device: nobody waits for them
        self._noted = 0  # of these; beyond `length` such as were taken back

    @in_inference_mode  # its tensor is made in that mode and can be written in no other
    def note(self, tokens: Tensor) -> None:
        """Tokens that are scored next, int64 [N]."""
        end = self.length + len(tokens)
        if end > len(self._tokens):
            self._tokens = torch.nn.functional.pad(self._tokens, (0, max(end, 64)))
        self._tokens[self.length : end] = tokens
        self._noted = end

    def noted(self, start: int, stop: int) -> Tensor:
        """Those at these positions, int64 [stop - start]."""
        return self._tokens[start:stop]

    def take_over(self, other: RecurrentSequence, length: int) -> None:
        """What another one begins with, to that length."""
        back, self._length = self._length, 0
        self.note(other.noted(0, length))
        self._length = back

    def advance(self, count: int) -> None:
        """See `SlotSequence`. Whoever measures costs pretends that something was scored (`costs.pass_timer`)."""
        if self.length + count > self._noted:
            self.note(self._tokens.new_zeros(count))
            self._cache.pretend(self.slot, self.length + count)
        super().advance(count)

    def go_back(self, length: int) -> None:
        """For scoring once more what it holds beyond."""
        self._length = length


class RecurrentModel(RecordedStates):
    """A loaded `PreTrainedModel` with recurrent layers as a `LanguageModel`.

    Over what is verified its recurrent layers go step by step, so that each token leaves a state (`recurrent.mixers`);
    prompts are read as they are without us. No pass is captured or compiled, and no alternatives are scored.
    """

    keeps_states = True
    pad_widths: Any = None  # padding would go through its states, and its layers fill up what is quicker so
    _alike = False  # whether its recurrent layers have the same bits for a token in passes of any width

    def _prepare(self, model: Any) -> None:
        kind = f"{self._name} ({model.config.model_type})"
        if not hasattr(Cache, "is_recording_past"):
            raise ModelError(f"{kind} can't be used: its recurrent layers need a later transformers, 5.23 for one")
        self._cache, self._mixers = RecurrentCache(len(self._cache.layers)), []
        try:
            with _without_hints() if self.device.type == "cpu" else nullcontext():
                self._find_out(model)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
            raise ModelError(
                f"{kind} can't be used: it does not run with kept states ({in_one_line(error, 160)})"
            ) from error
        if not self._mixers:
            raise ModelError(
                f"{kind} can't be used: it keeps a state of its own that can't be rolled back; use another model (Qwen 3.5, "
                "LFM 2, Granite 4, …)"
            )

    def _find_out(self, model: Any) -> None:
        """What the recurrent layers are, and how they can be taken."""
        self._mixers = find_mixers(model, self._cache, lambda: self._scored([[3]]))
        if self._mixers:
            self._try_rules()
            self._cache.goes_on = self._goes_on()
            convolving = all(mixer.ruled is not None and mixer.ruled.rule is None for mixer in self._mixers)
            self._alike = convolving and convolutions_alike(model.modules())
            self._keyed = [i for i, layer in enumerate(self._cache.layers) if layer.keys is not None]

    def _try_rules(self) -> None:
        """Keep to single tokens where steps of the rules known here do not give the plain pass's logits, or do not fit."""
        count = len(_TOKENS[-1])
        with torch.inference_mode():
            want = plain_logits(self, [t % self._vocab_size for part in _TOKENS for t in part])[0, -count:]
        try:
            same = off_by(self._scored(_TOKENS), want) <= allowed(self)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError):
            same = False
        if not same:
            self._mixers = [replace(mixer, ruled=None) for mixer in self._mixers]

    def _goes_on(self) -> bool:
        """Whether the recurrent layers go over many tokens at once from any state, not from an empty one alone (Mamba's)."""
        stepped = self._scored(_TOKENS)
        self._cache.steps = 1
        try:
            at_once = self._scored(_TOKENS)
        finally:
            self._cache.steps = STEPS
        return off_by(at_once, stepped) <= allowed(self)

    def _scored(self, parts: Many[list[int]]) -> Tensor:
        """The logits of the last of some passes, one after the other, of a sequence of its own. [N, V]"""
        sequence = self.open()
        try:
            for part in parts:
                out = self.score_few([sequence], *pad_rows([[t % self._vocab_size for t in part]], self.device), "all")
            assert out is not None
            return out[0].clone()
        finally:
            sequence.close()

    @property
    def recurrent_cache(self) -> RecurrentCache:
        """Where its states are kept."""
        return self._cache

    @property
    def same_bits(self) -> bool:
        """See `TransformersModel`; not with rules of torch's, which computes the last few of many numbers otherwise."""
        return super().same_bits and self._alike

    @property
    def scores_alternatives(self) -> bool:
        """What follows a token in another one's place would go on from the other one's state."""
        return False

    def compile(self) -> None:
        """Raises `ParameterError`."""
        raise ParameterError(f"compile can't be used with {self._name}, which has recurrent layers: leave it out")

    def open(self, reserve: int = 0) -> SlotSequence:
        return self._enter(RecurrentSequence(self, slot=len(self._open)), min(reserve, self._max_length or reserve))

    def release(self, sequence: SlotSequence) -> None:
        """See `SlotModel`."""
        super().release(sequence)
        self._cache.forget(len(self._open))

    def copy_prefix(self, source: Sequence, target: Sequence, length: int) -> None:
        """See `CopiesPrefixes`."""
        source, target = self._own(source), self._own(target)
        assert isinstance(source, RecurrentSequence)
        assert isinstance(target, RecurrentSequence)
        target.take_over(source, length)
        super().copy_prefix(source, target, length)

    def _score(self, rows: list[SlotSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        own = [row for row in rows if isinstance(row, RecurrentSequence)]
        for row in own:
            self._catch_up(row)
        for row, new, count in zip(own, tokens, lengths, strict=True):
            row.note(new[:count])
        return self._with_states(own, tokens, lengths, logits)

    def _catch_up(self, row: RecurrentSequence) -> None:
        """Score once more what lies between the last state known of a sequence and its end."""
        length, known = row.length, self._cache.rewind(row.slot, row.length)
        if known == length:
            return
        row.go_back(known)
        try:
            self._with_states([row], row.noted(known, length).unsqueeze(0), [length - known], "none")
        finally:
            row.go_back(length)

    def _with_states(
        self, rows: list[RecurrentSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits
    ) -> Tensor | None:
        """A pass whose states are kept if it comes to its end."""
        slots, starts = [row.slot for row in rows], [row.length for row in rows]
        self._cache.begin(slots, starts, lengths, reading=logits == "none")
        out = self._in_one_pass(list(rows), tokens, lengths, logits)
        self._cache.commit(slots, starts, lengths)
        return out
