"""The tokens that a draft's laws are over: where they are fewer than the target's, all work is done over these alone."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.models.base import LanguageModel, Sequence, fit_vocabulary, has_few_tokens
from outrider.sampling import SamplingSettings


@dataclass(frozen=True)
class OwnTokens:
    """What the T columns of a draft's logits stand for, beside a target of `vocab_size` tokens.

    ids: int64 [T], ascending; None: 0 … T - 1. whole: T = vocab_size in any case.
    """

    model: LanguageModel
    vocab_size: int
    ids: Tensor | None
    whole: bool

    @classmethod
    def of(cls, model: LanguageModel, vocab_size: int, sampling: SamplingSettings) -> OwnTokens:
        """Those of a draft. Biases, penalties and processors speak of the target's tokens: none may be missing then."""
        whole = not sampling.as_they_are
        few = not whole and has_few_tokens(model) and model.vocab_size <= vocab_size
        return cls(model, vocab_size, model.draft_tokens if few and has_few_tokens(model) else None, whole)

    def score(self, sequences: Many[Sequence], tokens: Tensor, lengths: Many[int]) -> Tensor:
        """See `LanguageModel.score`. → the logits after each sequence's last token, [R, T]"""
        few = self.ids is not None and has_few_tokens(self.model)
        score = self.model.score_few if few and has_few_tokens(self.model) else self.model.score
        logits = score(sequences, tokens, lengths, "last")
        assert logits is not None
        logits = logits[:, 0]
        return fit_vocabulary(logits, self.vocab_size) if self.whole else logits[..., : self.vocab_size]

    def tokens(self, columns: Tensor) -> Tensor:
        """What columns stand for."""
        return columns if self.ids is None else self.ids[columns]

    def named(self, columns: list[int]) -> list[int]:
        """The same on the host. Reads back."""
        return columns if self.ids is None or not columns else self.ids[columns].tolist()

    def laws(self, own: Tensor) -> Tensor:
        """Laws over the target's tokens. [.., T] → [.., vocab_size]"""
        if self.ids is None:
            return torch.nn.functional.pad(own, (0, self.vocab_size - own.shape[-1]))
        return own.new_zeros(*own.shape[:-1], self.vocab_size).index_copy_(-1, self.ids, own)
