"""Draft heads behind the engines' contract: sequences that ride on the target's own and read the states that it keeps.

The token at position j comes with the target's state of position j - 1, as far as the target has scored that one: nothing
is ever read of tokens that are drafted and not yet scored. Beyond, an autoregressive head goes on with the state that it
predicted itself; a position that was reached so is scored anew once the target's state is there (`HeadSequence.sure`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.errors import ParameterError
from outrider.heads.config import HeadConfig
from outrider.heads.parts import HeadParts
from outrider.heads.recorded import CapturedHead, RecordedHead
from outrider.models.base import HandsOutStates, Sequence
from outrider.models.cache.slots import SlotModel, SlotSequence
from outrider.models.cut_head import spread
from outrider.models.weights.packed_linear import bytes_of
from outrider.models.weights.quantized import quantized_by


class HeadSequence(SlotSequence):
    """What a head holds of a sequence. base: the target's own, None to measure costs without one.

    sure: leading positions that were scored with the target's states. last: the state predicted at the last one, [1, W].
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
    goes_on = False
    """See `pass_timer.Rides`."""

    def __init__(self, target: HandsOutStates, config: HeadConfig, parts: HeadParts) -> None:
        super().__init__(num_layers=1)
        target.keep_states(config.layers)
        self.target = target
        self.config = config
        self.network = parts.network
        self.dtype = parts.dtype
        self.quantized = parts.quantized
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
        weights = f"int8 by {quantized_by()}" if self.quantized else self.dtype
        how = "" if self.recorded is None else " recorded"
        return f"draft head{how}, drafting on {beside}, then on its own, {weights} {json.dumps(asdict(self.config))}"

    @property
    def leader(self) -> HandsOutStates:
        """See `pass_timer.Follows`."""
        return self.target

    @property
    def dtype_name(self) -> str:
        """Of its weights."""
        return "int8" if self.quantized else str(self.dtype).removeprefix("torch.")

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
            own = row.last
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
            return out.to(self.dtype)
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
