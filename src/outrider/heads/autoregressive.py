"""A head of one layer that goes on by itself, with keys and values of its own."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.heads.config import HeadConfig
from outrider.heads.engine import HeadModel, HeadSequence
from outrider.heads.layers import HeadNetwork
from outrider.heads.parts import HeadParts
from outrider.heads.recorded import CapturedHead, Kind, NewestToken, RecordedHead, record_head
from outrider.kernels.chain_calls import is_piece, numbers, piece_of
from outrider.models.attention.shared_keys import WIDEST, together
from outrider.models.base import HandsOutStates, WhichLogits
from outrider.models.cache.masks import AttentionPattern, make_mask
from outrider.models.cache.slot_cache import Placement
from outrider.models.kernels import attention as kernel_attention
from outrider.models.passes.recording import Recording
from outrider.models.states_model import StatesModel
from outrider.support.device_data import index, places_from


class AutoregressiveModel(HeadModel):
    """One layer with keys and values of its own."""

    goes_on = True

    def __init__(self, target: HandsOutStates, config: HeadConfig, parts: HeadParts) -> None:
        super().__init__(target, config, parts)
        self._reads_where_kept = isinstance(target, StatesModel) and self.device.type == "cpu"
        self._apart = self._reads_where_kept and type(self.network).condense is HeadNetwork.condense
        """Whether it reads states layer by layer."""
        self._blind_to_first = config.published is not None
        """Whether position 0, which no state comes before, is seen by itself alone: these heads were trained without it."""
        kinds = self.states_kind, self.own_kind
        kept = parts.recorded.get(kinds)
        if kept is not None and kept.module.table is self._table and kept.fits():
            self.module = kept.module
            self.recorded = kept.of_twin(self)
            return
        self.module = self._module()
        if self.device.type in ("cpu", "cuda"):
            self.recorded = record_head(self)
        if isinstance(self.recorded, RecordedHead):
            parts.recorded[kinds] = self.recorded

    @property
    def own_kind(self) -> Kind:
        """Of the state that it predicted itself, as it reads it."""
        return ((self.config.width, self.dtype),)

    @property
    def states_kind(self) -> Kind:
        """Of the target's states, as it reads them."""
        if not self._apart:
            return ((self.config.states_width, self.dtype),)
        return ((self.target.state_size, self.target.state_dtype),) * (1 + len(self.config.layers))

    def _module(self) -> NewestToken:
        return NewestToken(self.network, self._rows, self.dtype, self._table)

    @property
    def _table(self) -> nn.Module | None:
        """What embeds tokens in its passes, None where the target is asked for it."""
        if not self._reads_where_kept or self._embedding is not None:
            return self._embedding
        assert isinstance(self.target, StatesModel)
        return self.target.token_table

    def _look_again(self) -> None:
        if self.module.table is not self._table:
            self.module = self._module()
        elif self.recorded is None or self.recorded.fits():
            return
        had = self.recorded is not None
        self.recorded = None  # making it anew opens sequences
        if had:
            self.recorded = record_head(self)

    def _score(self, rows: list[HeadSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        if logits == "none" and len(rows) == 1 and isinstance(self.recorded, RecordedHead):
            for start in range(0, lengths[0], WIDEST):  # a prompt: the logits of a lone token are the smaller price
                part = tokens[:, start : min(start + WIDEST, lengths[0])]
                self._score(rows, part, [part.shape[1]], "last")
            return None
        width = tokens.shape[1]
        own: Tensor | None = None
        if logits == "last" and len(rows) == 1 and lengths[0] == width:
            states = self._each_before(rows[0], width)
            recording = None if self.recorded is None else self.recorded.of(states)
            own, last = self.newest(rows[0], tokens, states, recording)
        else:
            starts = tuple(row.length for row in rows)
            positions = places_from(starts, width, self.device)
            self._place(rows, starts, positions)
            embedded, before = self._embed(tokens), self._states_before(rows, lengths, width)
            predicted = self.network(embedded, before, positions, self._attend)
            at = torch.arange(len(rows), device=self.device), index([n - 1 for n in lengths], self.device)
            last = predicted[at].unsqueeze(1)
        for i, (row, count) in enumerate(zip(rows, lengths, strict=True)):
            sure = row.base is None or row.length + count - 1 <= row.base.length
            row.advance(count)
            row.sure = row.length if sure else row.sure
            row.last = last[i]
        if logits == "none":
            return None
        if own is not None:
            return own
        return self._logits(predicted if logits == "all" else last)

    def _each_before(self, row: HeadSequence, count: int) -> list[Tensor]:
        """The states before the next tokens of a row, [1, count, ·] each, to be read beside each other (`states_kind`)."""
        start, base = row.length - 1, row.base
        if self._apart and base is not None and start >= 0 and start + count <= base.length:
            assert isinstance(self.target, StatesModel)
            return self.target.states_by_layer(base, start, start + count, self.config.layers)
        before = self._before(row, count).unsqueeze(0)
        if not self._apart or before.shape[-1] < self.config.states_width:
            return [before]
        if base is None:  # costs are measured by what is read in use
            before = before.to(self.target.state_dtype)
        return list(torch.split(before, self.target.state_size, dim=-1))

    def newest(
        self, row: HeadSequence, tokens: Tensor, states: Many[Tensor], recording: Recording | CapturedHead | None
    ) -> Many[Tensor]:
        """What follows the last of one row's new tokens, by a recording or the network: see `NewestToken`."""
        given = self._embed(tokens) if self.module.table is None else tokens
        at, count = row.length, tokens.shape[1]
        held = [each.contiguous() for each in (given, *states)]
        if isinstance(recording, Recording) and recording.in_one_call and all(map(is_piece, held)):
            self._cache.reserve(len(self._open), at + count)
            self._cache.reach(row.slot, at + count)
            columns = array("q", range(at, at + count))
            return recording.call(row.slot, at + count, count, (*map(piece_of, held), numbers(columns)))
        positions = places_from((at,), count, self.device)
        self._place([row], (at,), positions)
        if recording is None:
            return self.module(given, states, positions, self._attend)  # type: ignore[no-any-return]
        return recording.run(slice(row.slot, row.slot + 1), at + count, given, *states, positions)

    def _place(self, rows: list[HeadSequence], starts: tuple[int, ...], positions: Tensor) -> None:
        longest = max(starts) + positions.shape[1]
        self._cache.reserve(len(self._open), longest)
        self._cache.placement = Placement(tuple(row.slot for row in rows), starts, positions, longest)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        place = self._cache.placement
        keys, values = self._cache.layers[0].update(keys, values)
        mask = None
        if queries.shape[0] > 1 or queries.shape[2] > 1 or place.length > self.config.window or self._blind_to_first:
            mask = self.mask(place.positions, place.length)
        return self.attention(queries, keys, values, mask)

    def mask(self, positions: Tensor, length: int) -> Tensor:
        """Of positions int64 [R, N], for so many columns: bool [R, 1, N, length]."""
        made: Tensor = make_mask(positions, length, AttentionPattern({"full_attention": self.config.window}, False))
        if self._blind_to_first:
            first = torch.arange(length, device=positions.device) == 0
            made = made & ~(first & (positions > 0)[:, None, :, None])
        return made

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Queries [R, heads, N, size], keys and values [R, kv heads, length, size] → [R, heads, N, size]"""
        if self.quantized:  # a last bit would become a step in the layers after it: batches would be other texts
            return kernel_attention.attend(self.network, queries, keys, values, mask)[0].transpose(1, 2)
        grouped = self.config.num_heads != self.config.num_kv_heads
        if grouped and self.device.type == "cpu":
            times = self.config.num_heads // self.config.num_kv_heads
            return together(queries, keys, values, None if mask is None else mask.repeat(1, 1, times, 1), None)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
