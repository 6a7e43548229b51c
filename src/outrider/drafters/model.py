"""A smaller model as the drafter: autoregressive, its tokens drawn from its own standardised distribution."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from outrider.device_data import index, pad_rows, to_device
from outrider.drafters.base import DraftContext, Drafter, DraftRow, Proposal, empty_proposal
from outrider.models.base import LanguageModel, fit_vocabulary
from outrider.models.compatibility import check_same_tokens
from outrider.prefill import prefill
from outrider.sampling import Context, draw, standardize


class ModelDrafter(Drafter):
    """Drafts with a `LanguageModel` that speaks the target's tokens.

    A row's state is its sequence in the draft model. It holds a prefix of the row's tokens and may lag behind by any
    number of them: after a fully accepted draft by two (the last drafted token, never scored here, and the bonus token).
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.name = model.name

    def check(self, target: Any) -> None:
        check_same_tokens(target, self.model)

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        limit = self.model.max_length
        fitting = []
        for row in rows:
            row.state = self.model.open()
            if limit is None or len(row.tokens) <= limit:
                fitting.append(row)
        with context.clock.phase("prefill"):
            prompts = [self._known(row.tokens[:-1]) for row in fitting]
            prefill(self.model, [row.state for row in fitting], prompts)

    def propose(
        self, rows: Many[DraftRow], limits: Many[int], uniforms: Many[Many[float]], context: DraftContext
    ) -> Proposal:
        lengths = [self._room(row, limit) for row, limit in zip(rows, limits, strict=True)]
        longest = max(lengths, default=0)
        if longest == 0:
            return empty_proposal(len(rows), context.device)
        padded = [list(u[:n]) + [0.0] * (longest - n) for u, n in zip(uniforms, lengths, strict=True)]
        noise = to_device(padded, context.device, torch.float64)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(longest):
            active = [i for i, length in enumerate(lengths) if length > step]
            with context.clock.phase("draft"):
                logits = self._advance([rows[i] for i in active], tokens, active)
            with context.clock.phase("sampling"):
                law = self._law(logits, [rows[i] for i in active], tokens, active, context)
                token = draw(law, _pick(noise[:, step], active))
                # An invalid law gives -1; clamped so that nothing indexes with it, it is then rejected or reported.
                tokens.append(_spread(token.clamp(min=0), active, len(rows)))
                probs.append(_spread(law, active, len(rows)))
        return Proposal(torch.stack(tokens, dim=1), lengths, torch.stack(probs, dim=1))

    def _room(self, row: DraftRow, limit: int) -> int:
        """How many tokens the draft model's context still allows: the first pass scores all that is pending."""
        if self.model.max_length is None:
            return limit
        return max(0, min(limit, self.model.max_length - len(row.tokens) + 1))

    def _advance(self, rows: list[DraftRow], drafted: list[Tensor], active: list[int]) -> Tensor:
        """Score what the draft model has not seen, or the token just drafted. → logits [A, 1, V']"""
        if drafted:
            tokens, lengths = _pick(drafted[-1], active).unsqueeze(-1), [1] * len(rows)
        else:
            pending = [self._known(row.tokens[row.state.length :]) for row in rows]
            tokens, lengths = pad_rows(pending, self.model.device)
        logits = self.model.score([row.state for row in rows], tokens, lengths, "last")
        assert logits is not None
        return logits

    def _known(self, tokens: list[int]) -> list[int]:
        """The tokens as the draft model may see them: a padding entry that only the target has becomes token 0."""
        size = self.model.vocab_size
        return tokens if max(tokens, default=0) < size else [token if token < size else 0 for token in tokens]

    def _law(
        self, logits: Tensor, rows: list[DraftRow], drafted: list[Tensor], active: list[int], context: DraftContext
    ) -> Tensor:
        fitted = fit_vocabulary(logits[:, 0], context.vocab_size)
        contexts = None
        if context.sampling.needs_context:
            contexts = [
                Context(_context_tokens(row, [t[i] for t in drafted], fitted.device), row.prompt_length)
                for row, i in zip(rows, active, strict=True)
            ]
        return standardize(fitted, context.sampling, contexts)

    def observe(self, rows: Many[DraftRow], drafted: Many[int], accepted: Many[int]) -> None:
        """Roll back to what the row's tokens still hold: everything before the recovered or bonus token, at most."""
        del drafted, accepted
        for row in rows:
            row.state.truncate(min(row.state.length, len(row.tokens) - 1))

    def end(self, row: DraftRow) -> None:
        row.state.close()


def _context_tokens(row: DraftRow, drafted: list[Tensor], device: torch.device) -> Tensor:
    known = index(row.tokens, device)
    return torch.cat([known, torch.stack(drafted)]) if drafted else known


def _spread(values: Tensor, active: list[int], rows: int) -> Tensor:
    """Put the active rows' values at their places among all rows, zeros elsewhere. [A, …] → [R, …]"""
    if len(active) == rows:
        return values
    out = values.new_zeros(rows, *values.shape[1:])
    return out.index_copy_(0, index(active, values.device), values)


def _pick(values: Tensor, active: list[int]) -> Tensor:
    """The active rows' values. [R, …] → [A, …]"""
    return values if len(active) == len(values) else values[index(active, values.device)]
