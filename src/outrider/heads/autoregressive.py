"""A head of one layer that goes on by itself, with keys and values of its own."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.heads.config import HeadConfig
from outrider.heads.engine import HeadModel, HeadSequence
from outrider.heads.layers import HeadNetwork
from outrider.heads.parts import HeadParts
from outrider.heads.recorded import CapturedHead, Kind, NewestToken, RecordedHead, kind_of, record_head
from outrider.kernels.chain_calls import is_piece, numbers, piece_of
from outrider.models.attention.shared_keys import WIDEST, together
from outrider.models.base import HandsOutStates, Sequence, WhichLogits
from outrider.models.cache.masks import AttentionPattern, make_mask
from outrider.models.cache.slot_cache import Placement
from outrider.models.flat import in_parts
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
    def keeps_prefixes(self) -> bool:
        """See `SlotModel`. Of what it reads of a prompt: there the target's states are known."""
        return True

    def append_blocks(self, sequence: Sequence, blocks: Many[list[Tensor]]) -> None:
        """See `KeepsPrefixes`."""
        super().append_blocks(sequence, blocks)
        row = self._own(sequence)
        row.sure, row.last = row.length, None

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

    @property
    def _flat(self) -> bool:
        """Whether tokens of several rows are read one after the other, in a call."""
        return isinstance(self.recorded, RecordedHead) and self.recorded.flat

    def _takes_any_order(self, rows: list[HeadSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> bool:
        del rows, tokens, lengths
        return self._flat and logits != "all"

    def _score(self, rows: list[HeadSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        kept = self.recorded if isinstance(self.recorded, RecordedHead) else None
        side_by_side = len(rows) == 1 or self._flat
        if logits == "none" and kept is not None and side_by_side:
            for parts in in_parts(lengths, WIDEST):  # of prompts
                some = [tokens[i, start : start + count] for i, start, count in parts]
                self._score_newest([rows[i] for i, _, _ in parts], some, wanted=False)
            return None
        if logits == "last" and len(rows) == 1:  # a drafted token's pass
            return self._score_alone(rows[0], tokens if lengths[0] == tokens.shape[1] else tokens[:, : lengths[0]])
        if logits == "last" and side_by_side:
            return self._score_newest(rows, [row[:count] for row, count in zip(tokens, lengths, strict=True)])
        width = tokens.shape[1]
        starts = tuple(row.length for row in rows)
        positions = places_from(starts, width, self.device)
        self._place(rows, starts, positions)
        embedded, before = self._embed(tokens), self._states_before(rows, lengths, width)
        predicted = self.network(embedded, before, positions, self._attend)
        at = torch.arange(len(rows), device=self.device), index([n - 1 for n in lengths], self.device)
        last = predicted[at].unsqueeze(1)
        for row, count, state in zip(rows, lengths, last, strict=True):
            _append(row, count, state)
        if logits == "none":
            return None
        return self._logits(predicted if logits == "all" else last)

    def _score_alone(self, row: HeadSequence, tokens: Tensor) -> Tensor | None:
        """Append tokens to a row, int64 [1, N]. → what follows the last of them, [1, 1, T]"""
        count = tokens.shape[1]
        states = self._each_before(row, count)
        recording = None if self.recorded is None else self.recorded.of(states)
        logits, last = self.newest((row,), (count,), tokens, states, recording)
        _append(row, count, last[0])
        return logits

    def _score_newest(self, rows: list[HeadSequence], parts: Many[Tensor], wanted: bool = True) -> Tensor | None:
        """Append to each row the tokens of its part, int64 [N]. → what follows the last of them, [R, 1, T], if wanted"""
        out: list[Tensor] = []
        order: list[int] = []
        read = [self._each_before(row, len(part)) for row, part in zip(rows, parts, strict=True)]
        for which, states, recording in self._alike(read):
            counts = [len(parts[i]) for i in which]
            tokens = torch.cat([parts[i] for i in which]).unsqueeze(0)
            logits, last = self.newest([rows[i] for i in which], counts, tokens, states, recording, wanted)
            for place, i in enumerate(which):
                _append(rows[i], len(parts[i]), last[0, place : place + 1])
            out += [] if logits is None else [logits.transpose(0, 1)]
            order += which
        if not wanted:  # some passes have them all the same
            return None
        return out[0] if len(out) == 1 else torch.cat(out)[index(order, self.device).argsort()]

    def _alike(self, read: list[list[Tensor]]) -> Iterator[tuple[list[int], list[Tensor], Recording | CapturedHead | None]]:
        """Rows whose states are of one kind, and what records their pass; one by one where that takes more than a call."""
        kinds: dict[Kind, list[int]] = {}
        for i, states in enumerate(read):
            kinds.setdefault(kind_of(states), []).append(i)
        for which in kinds.values():
            states = [torch.cat(each, dim=1) for each in zip(*(read[i] for i in which), strict=True)]
            recording = None if self.recorded is None else self.recorded.of(states)
            if isinstance(recording, Recording) and recording.in_one_call:
                yield which, states, recording
            else:
                yield from (([i], read[i], recording) for i in which)

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
        self,
        rows: Many[HeadSequence],
        counts: Many[int],
        tokens: Tensor,
        states: Many[Tensor],
        recording: Recording | CapturedHead | None,
        wanted: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        """What follows the last of each row's new tokens (`NewestToken`), by a recording or, of one row, the network.

        tokens: int64 [1, sum of counts], one row's after the other's; states alike. → logits [1, R, T], if wanted, and the
        states predicted there [1, R, W]
        """
        given = self._embed(tokens) if self.module.table is None else tokens
        starts = [row.length for row in rows]
        held = [each.contiguous() for each in (given, *states)]
        if isinstance(recording, Recording) and recording.in_one_call and all(map(is_piece, held)):
            spans = [(row.slot, count, at + count) for row, at, count in zip(rows, starts, counts, strict=True)]
            self._cache.reserve(len(self._open), max(end for _, _, end in spans))
            for slot, _, end in spans:
                self._cache.reach(slot, end)
            columns = array("q", [i for _, count, end in spans for i in range(end - count, end)])
            about = (*map(piece_of, held), numbers(columns))
            *logits, last = recording.call(spans, about, without=int(not wanted))
            return (logits[0] if wanted else None), last
        ((row,), (at,), (count,)) = rows, starts, counts
        positions = places_from((at,), count, self.device)
        self._place([row], (at,), positions)
        if recording is None:
            return self.module(given, states, positions, self._attend)  # type: ignore[no-any-return]
        out, last = recording.run(slice(row.slot, row.slot + 1), at + count, given, *states, positions)
        return out, last

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


def _append(row: HeadSequence, count: int, last: Tensor) -> None:
    """Note that a row's next tokens have been read. last: the state predicted at the last of them, [1, W]"""
    sure = row.base is None or row.length + count - 1 <= row.base.length
    row.advance(count)
    row.sure = row.length if sure else row.sure
    row.last = last
