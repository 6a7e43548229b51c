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
from outrider.models.passes.captured import CapturedPasses, width_captured
from outrider.models.passes.recorded import RecordedPasses
from outrider.models.passes.recording import Recording, kernels_allowed

FEW, WORTH_ITS_OWN = 4, 16  # rows, and tokens of each of more of them, that are read sooner by calls of their own


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
        twin._cache, twin._open = self._cache.like(), []
        twin.recorded = None
        return twin

    def _look_again(self) -> None:
        if self.recorded is not None and not self.recorded.fits():
            self.record()

    def _recording(self, rows: list[SlotSequence], width: int) -> Recording | CapturedPasses | None:
        """What scores all logits of so many tokens of these rows, None where that is the ordinary pass."""
        together = rows[-1].slot - rows[0].slot + 1 == len(rows)
        if self.recorded is None or not together or width > WIDEST or torch.is_autocast_enabled(self.device.type):
            return None
        return self.recorded.of(len(rows))

    def _recorded_width(self, recording: Recording | CapturedPasses, rows: list[SlotSequence], width: int) -> int:
        """How wide a pass is scored: captured ones come in a few widths, if there is room for the tokens that fill it up."""
        if not isinstance(recording, CapturedPasses):
            return width
        wide = width_captured(width)
        return wide if self.max_length is None or max(row.length for row in rows) + wide <= self.max_length else width

    def _read_in_one_call(self, row: SlotSequence, tokens: Tensor) -> bool:
        """Read a row's next tokens, int64 [1, N], without logits. → whether that could be done: it is by now, or not at all

        `WIDEST` at a time: what a later token sees of the earlier ones is no more than there is, and what layers hand on
        stays in the processor's caches.
        """
        recording = self._recording([row], min(WIDEST, tokens.shape[1]))
        for start in range(0, tokens.shape[1], WIDEST):
            part = tokens[:, start : start + WIDEST]
            longest = self._reserve([row], part.shape[1])
            if self._forward_in_one_call(recording, row, part, longest, wanted=False) is None:
                return False  # at the first part, if at all: the others are no different
            row.advance(part.shape[1])
        return True

    def _are_tokens(self, tokens: Tensor, rows: int) -> bool:
        if not tokens.is_cpu or tokens.dtype is not torch.int64 or len(tokens) != rows or not tokens.numel():
            return False
        least, most = torch.aminmax(tokens)
        return int(least) >= 0 and int(most) < self.vocab_size

    def _unread(self, rows: list[SlotSequence], tokens: Tensor, lengths: Sequence[int]) -> list[int]:
        """Which of these rows are left when those were read that can be, in one call each.

        Many short ones are quicker in one pass, by which weights are read once.
        """
        many = len(rows) > FEW and sum(lengths) < WORTH_ITS_OWN * len(rows)
        if many or not self._are_tokens(tokens, len(rows)):  # which an ordinary pass refuses before it writes anything
            return list(range(len(rows)))
        every = enumerate(zip(rows, lengths, strict=True))
        return [i for i, (row, count) in every if not self._read_in_one_call(row, tokens[i : i + 1, :count])]

    @abstractmethod
    def _reserve(self, rows: list[SlotSequence], width: int) -> int:
        """Get the cache ready for so many columns more of these rows. → how many are read"""

    def _forward_in_one_call(
        self,
        recording: Recording | CapturedPasses | None,
        row: SlotSequence,
        tokens: Tensor,
        longest: int,
        wanted: bool = True,
    ) -> list[Tensor] | None:
        """A list of the logits of one row's next tokens, int64 [1, N], if wanted; None where it takes more than one call."""
        if not isinstance(recording, Recording) or not recording.in_one_call or not is_piece(tokens):
            return None
        at, count = row.length, tokens.shape[1]
        into = [layer.place(row.slot, at, count) for layer in self._kept_states().values()]
        placed = [place for place in into if place is not None]
        if len(placed) < len(into):
            return None
        columns = array("q", range(at, at + count))
        where = numbers(columns)
        self._cache.reach(row.slot, at + count)
        return recording.call(row.slot, longest, count, (piece_of(tokens), where, where), placed, wanted)

    def _forward_recorded(
        self, recording: Recording | CapturedPasses, tokens: Tensor, positions: Tensor, longest: int, at: Tensor
    ) -> Tensor:
        """All logits."""
        slots = self._cache.placement.slots
        out, *states = recording.run(slice(slots[0], slots[-1] + 1), longest, tokens, positions, at, *self.source_rows())
        for layer, state in zip(self._kept_states(), states, strict=True):
            self._cache.states[layer].put(state)
        return out
