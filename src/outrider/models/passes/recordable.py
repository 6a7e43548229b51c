"""A model whose passes can be recorded (`recorded`): when they are, whether they still fit, and which pass takes them."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from outrider.kernels.chain_calls import is_piece, numbers, piece_of
from outrider.models.attention.shared_keys import WIDEST
from outrider.models.cache.slot_cache import StateLayer
from outrider.models.cache.slots import SlotModel, SlotSequence
from outrider.models.flat import in_parts
from outrider.models.passes.captured import CapturedPasses, width_captured
from outrider.models.passes.recorded import RecordedPasses
from outrider.models.passes.recording import Recording, kernels_allowed
from outrider.support.device_data import index


class RecordableModel(SlotModel[SlotSequence]):
    """looks_again: whether a recording that was kept is compared with its passes in each start.

    recorded_on: the kinds of devices on which its passes can be recorded (`recorded`) or captured (`captured`).

    wants_recorded: whether it was asked to; heads of its own on a GPU do as it does.
    """

    looks_again = True
    recorded_on: tuple[str, ...] = ("cpu",)
    wants_recorded = False
    device: torch.device
    _recorded: RecordedPasses | CapturedPasses | None = None
    _to_record: object = None

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def _kept_states(self) -> Mapping[int, StateLayer]:
        """Where the hidden states of a pass are put, by layer."""

    @abstractmethod
    def _record_now(self) -> RecordedPasses | CapturedPasses | None:
        """The recorded passes, None where there can't be any."""

    @abstractmethod
    def source_rows(self) -> list[Tensor]:
        """What a pass over the rows at hand reads of their sources."""

    def record(self) -> None:
        """From now on score a few tokens a sequence by recorded passes, which give the same bits sooner (`recorded`).

        On a GPU passes are captured instead (`captured`). Does nothing where a model can't be recorded. Where weights are
        replaced later, or hooks and adapters added, that is seen when the next sequence is opened, and passes are recorded
        anew or no more; numbers that the code reads off its modules (a scale, say) must stay as they are.

        That takes seconds where no recording is kept, and is put off until the first sequence is opened: a head that is
        bound before it wants passes with states.
        """
        self.wants_recorded = True
        self._recorded, self._to_record = None, kernels_allowed() if self.device.type in self.recorded_on else None

    @property
    def recorded(self) -> RecordedPasses | CapturedPasses | None:
        """The recorded passes, made now if that was put off; None where there are none.

        Not inside autocast or where other kernels are allowed than when it was put off: those are no passes of later.
        """
        wanted = self._to_record
        if wanted is not None and wanted == kernels_allowed() and not torch.is_autocast_enabled(self.device.type):
            self._to_record = None
            try:
                self._recorded = self._record_now()
            except BaseException:  # an interrupt: the next sequence tries again
                self._to_record = wanted
                raise
        return self._recorded

    @recorded.setter
    def recorded(self, passes: RecordedPasses | CapturedPasses | None) -> None:
        self._recorded, self._to_record = passes, None

    def with_a_cache_of_its_own(self) -> Self:
        """The same module with no sequences and no recorded passes, to try something."""
        twin = copy(self)
        twin._cache, twin._open, twin.prefix_cache = self._cache.like(), [], None
        twin.recorded = None
        return twin

    def _look_again(self) -> None:
        if self.recorded is not None and not self.recorded.fits():
            self.record()

    def _recording(self, rows: list[SlotSequence], width: int) -> Recording | CapturedPasses | None:
        """What scores all logits of so many tokens of these rows, None where that is the ordinary pass."""
        if self.recorded is None or width > WIDEST or torch.is_autocast_enabled(self.device.type):
            return None
        together = rows[-1].slot - rows[0].slot + 1 == len(rows)
        return self.recorded.of(len(rows), width) if together or self.flat else None

    @property
    def flat(self) -> bool:
        """See `is_flat`: whether a pass is of tokens one after the other, whosever they are."""
        return isinstance(self.recorded, RecordedPasses) and self.recorded.flat

    def _recorded_width(self, recording: Recording | CapturedPasses, rows: list[SlotSequence], width: int) -> int:
        """How wide a pass is scored: captured ones come in a few widths, if there is room for the tokens that fill it up."""
        if not isinstance(recording, CapturedPasses):
            return width
        wide = width_captured(width)
        return wide if self.max_length is None or max(row.length for row in rows) + wide <= self.max_length else width

    def _read_in_calls(self, rows: list[SlotSequence], tokens: Tensor, lengths: Sequence[int]) -> bool:
        """Read the rows' next tokens, int64 [R, N], without logits. → whether it could be: by now it is, or not at all

        `WIDEST` at a time: what a later token sees of the earlier ones is no more than there is, and what layers hand on
        stays in the processor's caches. A part may be the end of a row and the beginning of the next.
        """
        for parts in in_parts(lengths, WIDEST) if self.flat else ():
            some = [rows[i] for i, _, _ in parts]
            counts = [count for _, _, count in parts]
            flat = torch.cat([tokens[i, start : start + count] for i, start, count in parts]).unsqueeze(0)
            self._reserve(some, max(counts))
            if self._forward_in_one_call(self._recording(some, max(counts)), some, counts, flat, wanted=False) is None:
                return False  # at the first part, if at all: the others are no different
            for row, count in zip(some, counts, strict=True):
                row.advance(count)
        return self.flat

    def _are_tokens(self, tokens: Tensor, rows: int) -> bool:
        if not tokens.is_cpu or tokens.dtype is not torch.int64 or len(tokens) != rows or not tokens.numel():
            return False
        least, most = torch.aminmax(tokens)
        return int(least) >= 0 and int(most) < self.vocab_size

    @abstractmethod
    def _reserve(self, rows: list[SlotSequence], width: int) -> int:
        """Get the cache ready for so many columns more of these rows. → how many are read"""

    def _forward_in_one_call(
        self,
        recording: Recording | CapturedPasses | None,
        rows: list[SlotSequence],
        counts: Sequence[int],
        tokens: Tensor,
        wanted: bool = True,
    ) -> Tensor | None:
        """Score the next tokens of some rows, int64 [1, sum of counts], one row's after the other's. There is room for them.

        → their logits [sum of counts, V], if wanted, else something; None where it takes more than one call
        """
        if not isinstance(recording, Recording) or not recording.in_one_call or not is_piece(tokens):
            return None
        kept = list(self._kept_states().values())
        into = []
        if len(rows) == 1:  # states go where they are kept, if there is a place
            at, count = rows[0].length, counts[0]
            into = [place for layer in kept if (place := layer.place(rows[0].slot, at, count)) is not None]
            into = into if len(into) == len(kept) else []
        columns, spans = array("q"), []
        for row, count in zip(rows, counts, strict=True):
            end = row.length + count
            columns.extend(range(row.length, end))
            spans.append((row.slot, count, end))
            self._cache.reach(row.slot, end)
        where = numbers(columns)
        out = recording.call(spans, (piece_of(tokens), where, where), into, without=int(not wanted))
        logits, states = (out[0][0], out[1:]) if wanted else (tokens, out)
        if states:
            slots = index([slot for slot, count, _ in spans for _ in range(count)], tokens.device)
            positions = torch.frombuffer(columns, dtype=torch.int64)
            for layer, state in zip(kept, states, strict=True):
                layer.put_flat(slots, positions, state[0])
        return logits

    def _forward_recorded(
        self, recording: Recording | CapturedPasses, tokens: Tensor, positions: Tensor, longest: int, at: Tensor
    ) -> Tensor:
        """All logits."""
        slots = self._cache.placement.slots
        out, *states = recording.run(slice(slots[0], slots[-1] + 1), longest, tokens, positions, at, *self.source_rows())
        for layer, state in zip(self._kept_states(), states, strict=True):
            self._cache.states[layer].put(state)
        return out
