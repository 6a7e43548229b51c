"""Draft heads behind the engines' contract: sequences that ride on the target's own and read the states that it keeps.

The token at position j comes with the target's state of position j - 1, as far as the target has scored that one: nothing
is ever read of tokens that are drafted and not yet scored. Beyond, an autoregressive head goes on with the state that it
predicted itself; a position that was reached so is scored anew once the target's state is there (`HeadSequence.sure`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.device_data import index
from outrider.errors import ModelError, ParameterError
from outrider.heads.config import HeadConfig
from outrider.heads.parts import HeadParts, parts_of
from outrider.heads.published.eagle import usual_layers
from outrider.heads.recorded import CapturedHead, NewestToken, RecordedHead, record_head
from outrider.heads.stored import read_shape
from outrider.models.base import HandsOutStates, Sequence, WhichLogits
from outrider.models.cut_head import spread
from outrider.models.kernels import attention as kernel_attention
from outrider.models.masks import AttentionPattern, make_mask
from outrider.models.packed_linear import bytes_of
from outrider.models.recording import Recording
from outrider.models.rounded import can_round, rounded_by
from outrider.models.shared_keys import together
from outrider.models.slot_cache import Placement
from outrider.models.slots import SlotModel, SlotSequence

HEAD_DTYPES = ("auto", "float", "int8")
"""Of a head's weights: "float", the target's states' type; "int8"; "auto", in 8 bits on a CPU with kernels for it, unless
the target is in float64, which is for checking, or float16. Rounding changes what is proposed, never the law of what is
accepted."""


class HeadSequence(SlotSequence):
    """What a head holds of a sequence. base: the target's own, None to measure costs without one.

    sure: leading positions that were scored with the target's states. last: the state predicted at the last position.
    """

    def __init__(self, model: Any, slot: int, base: Sequence | None) -> None:
        super().__init__(model, slot)
        self.base = base
        self.sure = 0
        self.last: Tensor | None = None

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.last = None
        super().truncate(length)
        self.sure = min(self.sure, length)


class HeadModel(SlotModel[HeadSequence]):
    """A head bound to its target, as a `LanguageModel` with the target's tokens; those outside its own have logit -inf."""

    recorded: RecordedHead | CapturedHead | None = None

    def __init__(self, target: HandsOutStates, config: HeadConfig, parts: HeadParts) -> None:
        super().__init__(num_layers=1)
        target.keep_states(config.layers)
        self.target = target
        self.config = config
        self.network = parts.network
        self.dtype = parts.dtype
        self.rounded = parts.rounded
        self.draft_tokens = parts.tokens if len(parts.tokens) < target.vocab_size else None
        """The tokens that it can draft, ascending, if these are not all."""
        self._rows = parts.rows
        self._embedding = parts.embedding

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def max_length(self) -> int | None:
        return None

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def fingerprint(self) -> str:
        """What the costs of a pass depend on, the machine apart."""
        beside = type(self.target).__name__  # embeddings come from its engine, whose threads are at work as well
        weights = f"int8 by {rounded_by()}" if self.rounded else self.dtype
        how = "" if self.recorded is None else " recorded"
        return f"draft head{how} after a pass of {beside}, then of its own, {weights} {json.dumps(asdict(self.config))}"

    @property
    def leader(self) -> HandsOutStates:
        """See `pass_timer.Follows`."""
        return self.target

    @property
    def dtype_name(self) -> str:
        """Of its weights."""
        return "int8" if self.rounded else str(self.dtype).removeprefix("torch.")

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of one token reads."""
        return bytes_of([*self.network.modules(), *self._rows.modules()])

    def open(self, reserve: int = 0) -> HeadSequence:
        """A sequence without a target's, whose states are zeros: what passes cost can be measured with it."""
        return self.open_on(None, reserve)

    def open_on(self, base: Sequence | None, reserve: int = 0) -> HeadSequence:
        """A sequence that reads the states of the target's sequence `base`."""
        return self._enter(HeadSequence(self, len(self._open), base), reserve)

    def _states_before(self, rows: list[HeadSequence], lengths: Many[int], width: int) -> Tensor:
        """The states of the position before each new one: the target's, else the head's own. → [R, width, states_width]"""
        parts = [self._before(row, count) for row, count in zip(rows, lengths, strict=True)]
        if len(parts) == 1 and len(parts[0]) == width:
            return parts[0].unsqueeze(0)
        wide = max(part.shape[-1] for part in parts)
        return torch.stack([F.pad(part, (0, wide - part.shape[-1], 0, width - len(part))) for part in parts])

    def _before(self, row: HeadSequence, count: int) -> Tensor:
        start, stop = row.length - 1, row.length + count - 1
        scored = row.base.length if row.base is not None else 0
        known = max(0, min(stop, scored) - max(start, 0))
        parts = []
        if start < 0:
            parts.append(self._zeros(1))  # nothing comes before the first token
        if known and row.base is not None:
            held = self.target.states(row.base, max(start, 0), max(start, 0) + known, self.config.layers)
            parts.append(self.network.condense(held.to(self.dtype)))
        missing = count - known - len(parts[:1] if start < 0 else ())
        if missing and not known and start >= 0 and row.last is not None:
            own = row.last.unsqueeze(0)
            if not parts and missing == 1:
                return own  # the common case: what further layers would say is zeros, and need not be said
            parts.append(F.pad(own, (0, self.config.states_width - self.config.width)))
            missing -= 1
        if missing:
            if row.base is not None:
                raise ParameterError(f"the {self.name} can't be {missing} positions ahead of its target: score those first")
            parts.append(self._zeros(missing))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is not None:
            out: Tensor = self._embedding(tokens)
            return out
        return self.target.embed(tokens).to(self.dtype)

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, self.config.states_width, dtype=self.dtype, device=self.device)

    def _logits(self, states: Tensor) -> Tensor:
        """See `HeadParts.rows`."""
        out: Tensor = self._rows(states)
        return out

    def over_vocabulary(self, out: Tensor) -> Tensor:
        """Logits of the head's own tokens at the target's ids. [.., T] → [.., V]"""
        return out if self.draft_tokens is None else spread(out, self.draft_tokens, self.vocab_size)


class AutoregressiveModel(HeadModel):
    """One layer with keys and values of its own."""

    def __init__(self, target: HandsOutStates, config: HeadConfig, parts: HeadParts) -> None:
        super().__init__(target, config, parts)
        self.module = NewestToken(self.network, self._rows)
        self._blind_to_first = config.published is not None
        """Whether position 0, which no state comes before, is seen by itself alone: these heads were trained without it."""
        if self.device.type in ("cpu", "cuda"):
            self.recorded = record_head(self)

    def _look_again(self) -> None:
        if self.recorded is not None and not self.recorded.fits():
            self.recorded = None  # making it anew opens sequences
            self.recorded = record_head(self)

    def _score(self, rows: list[HeadSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        width = tokens.shape[1]
        starts = tuple(row.length for row in rows)
        embedded, before = self._embed(tokens), self._states_before(rows, lengths, width)
        positions = index(starts, self.device).unsqueeze(-1) + torch.arange(width, device=self.device)
        own: Tensor | None = None
        if logits == "last" and len(rows) == 1 and lengths[0] == width:
            recording = None if self.recorded is None else self.recorded.of(width, before.shape[-1])
            own, last = self.newest(rows[0], embedded, before, positions, recording)
        else:
            self._place(rows, starts, positions)
            predicted = self.network(embedded, before, positions, self._attend)
            last = predicted[torch.arange(len(rows), device=self.device), index([n - 1 for n in lengths], self.device)]
        for i, (row, count) in enumerate(zip(rows, lengths, strict=True)):
            sure = row.base is None or row.length + count - 1 <= row.base.length
            row.advance(count)
            row.sure = row.length if sure else row.sure
            row.last = last[i]
        if logits == "none":
            return None
        if own is not None:
            return own
        return self._logits(predicted if logits == "all" else last.unsqueeze(1))

    def newest(
        self,
        row: HeadSequence,
        embedded: Tensor,
        before: Tensor,
        positions: Tensor,
        recording: Recording | CapturedHead | None,
    ) -> Many[Tensor]:
        """What follows the last of one row's new tokens, by a recording or the network: see `NewestToken`."""
        self._place([row], (row.length,), positions)
        if recording is None:
            return self.module(embedded, before, positions, self._attend)  # type: ignore[no-any-return]
        longest = self._cache.placement.length
        return recording.run(slice(row.slot, row.slot + 1), longest, embedded, before, positions)

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
        if self.rounded:  # a last bit's difference would become a step in the layers after it: batches would be other texts
            return kernel_attention.attend(self.network, queries, keys, values, mask)[0].transpose(1, 2)
        grouped = self.config.num_heads != self.config.num_kv_heads
        if grouped and self.device.type == "cpu":
            times = self.config.num_heads // self.config.num_kv_heads
            return together(queries, keys, values, None if mask is None else mask.repeat(1, 1, times, 1), None)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)


class BlockwiseModel(HeadModel):
    """Heads for the next positions, all computed when the newest certain token is scored; further tokens are read off.

    A sequence's `last` holds the logits of all its blocks, [blocks, T].
    """

    def _score(self, rows: list[HeadSequence], tokens: Tensor, lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        if all(row.base is not None and row.base.length < row.length for row in rows):
            return self._read_off(rows, lengths, logits)
        before = self._states_before(rows, lengths, tokens.shape[1])
        for row, count in zip(rows, lengths, strict=True):
            row.advance(count)
            row.sure = row.length
        if logits == "none":
            return None
        embedded = self._embed(tokens)
        if logits == "all":
            return self._logits(self.network(embedded, before, 1))[..., 0, :]
        each, at = torch.arange(len(rows), device=self.device), index([n - 1 for n in lengths], self.device)
        blocks = self._logits(self.network(embedded[each, at], before[each, at]))
        for i, row in enumerate(rows):
            row.last = blocks[i]
        return blocks[:, :1]

    def _read_off(self, rows: list[HeadSequence], lengths: Many[int], logits: WhichLogits) -> Tensor | None:
        """After one drafted token more: what the next head said, whatever that token was."""
        chosen = []
        for row, count in zip(rows, lengths, strict=True):
            at = row.length + count - row.sure
            if logits != "last" or count != 1 or row.last is None or at >= self.config.blocks:
                raise ParameterError(f"the {self.name} has {self.config.blocks} heads: it can't be read further ahead")
            row.advance(count)
            chosen.append(row.last[at])
        return torch.stack(chosen).unsqueeze(1)


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


def check_fits(target: HandsOutStates, config: HeadConfig) -> None:
    """Raise `ModelError` unless states and tokens of the target are those that the head was made for."""
    ours = (target.state_size, target.vocab_size)
    if ours != (config.target_width, config.vocab_size):
        raise ModelError(
            f"the draft head for {config.target} can't draft for {target.name}: it was made for states of "
            f"{config.target_width} and {config.vocab_size} tokens, not {ours[0]} and {ours[1]}; train one with outrider "
            "train head"
        )


def check_dtype(dtype: str) -> None:
    """Raise `ParameterError` unless a head's weights can be asked for so."""
    if dtype not in HEAD_DTYPES:
        raise ParameterError(f"draft head's dtype must be {', '.join(HEAD_DTYPES[:-1])} or {HEAD_DTYPES[-1]}, got {dtype!r}")


def _rounds(dtype: str, target: HandsOutStates) -> bool:
    """Whether the weights of a head are to be in 8 bits. Raises `ModelError` if they can't be."""
    check_dtype(dtype)
    possible = target.device.type == "cpu" and can_round()
    if dtype == "int8" and not possible:
        raise ModelError(
            f"draft head can't be rounded to int8 on {target.device}: it needs a CPU and a build of torch with kernels for "
            "it; leave the head's dtype out"
        )
    usual = target.rounded or target.state_dtype in (torch.float32, torch.bfloat16)
    return possible and (dtype == "int8" or (dtype == "auto" and usual))


def _of_usual_layers(target: HandsOutStates, config: HeadConfig) -> HeadConfig:
    layers = usual_layers(target.num_layers)
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise ModelError(
            f"the draft head for {config.target} can't draft for {target.name}: it reads the states of layers "
            f"{', '.join(map(str, layers))} of a target with {target.num_layers} unless its config names others"
        )
    return replace(config, layers=layers)


def open_head(target: HandsOutStates, folder: Path, dtype: str = "auto") -> HeadModel:
    """The head in a folder, for this target. dtype: of its weights, one of `HEAD_DTYPES`."""
    config = read_shape(folder)
    check_fits(target, config)
    if config.published is not None and config.published.reads and not config.layers:
        config = _of_usual_layers(target, config)
    rounded = _rounds(dtype, target)
    parts = parts_of(target, folder, torch.float32 if rounded else target.state_dtype, rounded)
    make = AutoregressiveModel if config.kind == "autoregressive" else BlockwiseModel
    return make(target, config, parts)
