"""Passes of models with recurrent layers, and how they are recorded: states are given to a recording, and left by it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.kernels.build import level_here
from outrider.kernels.recurrences import recurrence_kernels
from outrider.models.cache.recurrent_cache import RecurrentCache
from outrider.models.cache.slot_cache import SlotLayer
from outrider.models.cache.slots import SlotSequence
from outrider.models.passes.captured import CapturedPasses
from outrider.models.passes.recorded import RecordedPasses
from outrider.models.passes.recording import Recording
from outrider.models.passes.tracing import TracedRows
from outrider.models.recurrent.mixers import Mixer, stepping
from outrider.models.recurrent.traced import Layout, TracedStates
from outrider.models.transformers_model import TransformersModel
from outrider.support.device_data import pad_rows


class RecordedStates(TransformersModel):
    """A model with recurrent layers, as far as its passes go: ordinary ones, and on a CPU recorded ones of a few tokens."""

    recorded_on: tuple[str, ...] = ("cpu",)
    _cache: RecurrentCache
    _mixers: list[Mixer]
    _keyed: list[int]  # its layers with keys and values
    _layouts: tuple[Layout, Layout]  # what passes of one token leave, and of several

    def _forward(
        self, tokens: Tensor, positions: Tensor, longest: int, kept: list[int] | None, at: Tensor | None = None
    ) -> Tensor:
        with stepping(self._mixers, self._cache):
            return super()._forward(tokens, positions, longest, kept, at)

    def _record_now(self) -> RecordedPasses | CapturedPasses | None:
        twin = self.with_a_cache_of_its_own()
        self._layouts = twin._layout([1, 2]), twin._layout([1, 2, 3])
        return super()._record_now()

    def _layout(self, tokens: list[int]) -> Layout:
        """What a pass leaves of all but the first of these."""
        sequence = self.open()
        try:
            for part in (tokens[:1], tokens[1:]):
                self.score_few([sequence], *pad_rows([part], self.device), "all")
            return Layout(self._cache.left(sequence.slot, len(tokens)))
        finally:
            sequence.close()

    def _keyed_layers(self) -> Many[SlotLayer]:
        return [self._cache.layers[i] for i in self._keyed]

    def states_described(self) -> list[object]:
        """See `TransformersModel`: which mixers go by a rule was tried with these weights."""
        level = level_here() if recurrence_kernels() is not None else None
        return [level, [mixer.ruled is not None for mixer in self._mixers], *(str(layout) for layout in self._layouts)]

    def source_like(self, rows: Any, length: Any) -> list[Tensor]:
        """See `TransformersModel`: here, states."""
        del length
        empty = [self._cache.empty(key) for key in self._layouts[0].keys]
        return [torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device=one.device) for one in empty]

    def traced_cache(self, layers: list[TracedRows], source: Many[Tensor], width: Any) -> Cache:
        """See `TransformersModel`."""
        keyed = dict(zip(self._keyed, layers, strict=True))
        return TracedStates(len(self._cache.layers), keyed, dict(zip(self._layouts[0].keys, source, strict=True)), width)

    def placed(self, positions: Tensor, longest: int, cache: Cache) -> AbstractContextManager[None]:
        """See `TransformersModel`."""
        del positions, longest
        return stepping(self._mixers, cache)

    def left_in(self, cache: Cache) -> list[Tensor]:
        """See `TransformersModel`."""
        run = cache.runs[0]
        run.end_step()
        return self._left_by(run.width).tensors(run.states)

    def _left_by(self, width: Any) -> Layout:
        return self._layouts[0 if isinstance(width, int) and width == 1 else 1]

    def _recording(self, rows: list[SlotSequence], width: int) -> Recording | CapturedPasses | None:
        stepped = len(self._cache.runs) == 1 and self._cache.runs[0].steps
        return super()._recording(rows, width) if stepped else None

    def _forward_recorded(
        self, recording: Recording | CapturedPasses, tokens: Tensor, positions: Tensor, longest: int, at: Tensor
    ) -> Tensor:
        assert isinstance(recording, Recording)
        (run,), layout = self._cache.runs, self._left_by(tokens.shape[1])
        states = self._cache.given(layout.keys)
        if states is None:
            return self._forward(tokens, positions, longest, None, at)
        slots = self._cache.placement.slots
        out, *made = recording.run(slice(slots[0], slots[-1] + 1), longest, tokens, positions, *states)
        kept = self._kept_states()
        for layer, state in zip(kept.values(), made, strict=False):
            layer.put(state)
        run.states.update(layout.states(made[len(kept) :], tokens.shape[1]))
        return out
