"""Two drafters of one's own: phrases that are known beforehand, and what followed a token earlier in the text.

    cd examples
    outrider generate "Tell me a joke" --draft python:make=own_drafters.PhraseDrafter --compare
    outrider audit --draft python:make=own_drafters.FollowerDrafter --tokens 2000

docs/writing-a-drafter.md goes through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from outrider.costs import DraftSeconds
from outrider.drafters import DraftContext, Drafter, DraftRow, Plan, Proposal, Prospect, padded_proposal
from outrider.models.base import LanguageModel
from outrider.sampling import draw

PHRASES = ("Sure, here is", "I'm sorry, but as an AI language model,", "Please let me know if you have any questions.")


class PhraseDrafter(Drafter):
    """Goes on with a phrase whose first tokens have just been written. What it proposes is certain: it draws nothing."""

    name = "phrases"

    def __init__(self, phrases: Sequence[str] = PHRASES, known: int = 1) -> None:
        self._texts, self._known = phrases, known
        self._phrases: list[list[int]] = []

    def bind(self, target: LanguageModel) -> None:
        """Before a generation: the phrases in the target's tokens, after a space and without one."""
        tokenizer = target.tokenizer  # type: ignore[attr-defined]
        ways = [text for phrase in self._texts for text in (phrase, f" {phrase}")]
        self._phrases = [tokenizer.encode(text, add_special_tokens=False) for text in ways]

    def prospects(self, row: DraftRow) -> list[Prospect]:
        """How much there is to draft: with nothing, the round is one of plain decoding."""
        return [Prospect(self.name, longest=len(self._rest(row)))]

    def propose(self, rows: Sequence[DraftRow], plans: Sequence[Plan], context: DraftContext) -> Proposal:
        """The rest of the phrase, as far as the plan goes."""
        drafts = [self._rest(row)[: plan.limit] for row, plan in zip(rows, plans, strict=True)]
        return padded_proposal(drafts, context.device)

    def _rest(self, row: DraftRow) -> list[int]:
        new = row.tokens[row.prompt_length :]
        for phrase in self._phrases:
            for length in range(min(len(phrase) - 1, len(new)), self._known - 1, -1):
                if new[-length:] == phrase[:length]:
                    return phrase[length:]
        return []


class FollowerDrafter(Drafter):
    """Draws what followed the last token earlier in the text, each time as likely as it was often."""

    name = "followers"

    @property
    def seconds(self) -> DraftSeconds:
        """A token costs a law as long as the vocabulary: so much here. It would be taken for nothing if it were not said."""
        return DraftSeconds(token=2e-4)

    def prospects(self, row: DraftRow) -> list[Prospect]:
        """There is something to draw from if the last token was there before."""
        longest = 64 if row.tokens[-1] in row.tokens[:-1] else 0
        return [Prospect(self.name, step_seconds=self.seconds.token, longest=longest)]

    def propose(self, rows: Sequence[DraftRow], plans: Sequence[Plan], context: DraftContext) -> Proposal:
        """Each token by a number of the row's own stream, beside the law that it was drawn from."""
        drafts: list[list[int]] = []
        laws: list[list[Tensor]] = []
        with context.clock.phase("draft"):
            for row, plan in zip(rows, plans, strict=True):
                drafts.append([])
                laws.append([])
                for uniform in row.stream.take(plan.limit):
                    law = self._law([*row.tokens, *drafts[-1]], context.vocab_size)
                    if law is None:
                        break
                    drafts[-1].append(int(draw(law, torch.tensor(uniform, dtype=torch.float64))))
                    laws[-1].append(law[None])
        return padded_proposal(drafts, context.device, laws)

    def _law(self, tokens: Sequence[int], vocab_size: int) -> Tensor | None:
        """[V], or None where the last token is new."""
        last = tokens[-1]
        followers = [after for token, after in pairwise(tokens) if token == last]
        if not followers:
            return None
        return torch.bincount(torch.tensor(followers), minlength=vocab_size).float() / len(followers)
