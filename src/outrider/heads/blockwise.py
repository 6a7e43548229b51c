"""Heads that say several positions at once."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.heads.engine import HeadModel, HeadSequence
from outrider.models.base import WhichLogits
from outrider.support.device_data import index


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
