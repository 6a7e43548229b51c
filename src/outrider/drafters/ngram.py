"""An n-gram table as the drafter (Leviathan 3.6, 4.2): microseconds a token, with true probabilities.

Sampling, tokens are drawn from the table's own standardised law and tested by the ratio rule. At temperature 0 the table's
first guess is proposed, a point mass, without writing out a law over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.costs import DraftSeconds
from outrider.draft_length.base import Plan, Prospect
from outrider.drafters.base import DraftContext, Drafter
from outrider.errors import VocabularyMismatchError
from outrider.models.base import LanguageModel
from outrider.models.compatibility import fingerprint
from outrider.ngram.table import NgramTable, read_table
from outrider.proposal import DraftRow, Proposal, padded_proposal
from outrider.sampling import SamplingSettings, draw_each, standardize
from outrider.support.checks import check_count
from outrider.support.device_data import to_device

# Acceptance assumed at first by the length of the longest context seen, on text like the corpus.
PRIORS = (0.05, 0.2, 0.35, 0.5, 0.6, 0.65, 0.7, 0.7)
STEP_SECONDS = {True: 5e-6, False: 5e-4}  # by whether the law need not be written out; as `outrider bench copying` found it


class NgramDrafter(Drafter):
    """table: a `NgramTable` or the file of one. order: longer n-grams than this are not used."""

    def __init__(self, table: NgramTable | str | Path, order: int | None = None) -> None:
        self.table = table if isinstance(table, NgramTable) else read_table(Path(table).expanduser())
        if order is not None:
            check_count("order", order, high=self.table.order, remedy="the table holds no longer n-grams")
            self.table = self.table.cut(order)
        self.name = f"{self.table.order}-gram"
        if not isinstance(table, NgramTable):
            self.name += f" ({Path(table).stem})"  # several may be offered beside each other
        self._last = {"quick": True}  # how it was asked last, of all its copies: for reports

    def occasion(self) -> Many[int]:
        """The table's digest: it may have been counted from what the same seed gave after the same prompt."""
        return (int.from_bytes(self.table.digest, "little"),)

    def bind(self, target: LanguageModel) -> None:
        if fingerprint(target) != self.table.tokenizer:
            raise VocabularyMismatchError(
                f"the {self.name} table was counted with another tokenizer than that of {target.name}: train it with "
                "outrider train-ngram --target"
            )

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        self._last["quick"] = quick = _quick(context.sampling)
        for row in rows:  # of the row, not of the drafter: batches that sample otherwise may share it
            row.state = quick

    @property
    def seconds(self) -> DraftSeconds:
        """As it was asked last; quick at first."""
        return DraftSeconds(STEP_SECONDS[self._last["quick"]])

    def seconds_for(self, sampling: SamplingSettings) -> DraftSeconds:
        return DraftSeconds(STEP_SECONDS[_quick(sampling)])

    def prospects(self, row: DraftRow) -> list[Prospect]:
        depth = self.table.depth(row.tokens[-self.table.order :])
        prior = PRIORS[min(depth, len(PRIORS) - 1)]
        quick = bool(row.state)
        return [Prospect(self.name, depth, prior, prior, step_seconds=STEP_SECONDS[quick], deterministic=quick)]

    def preview(self, row: DraftRow, prospect: int, limit: int) -> Iterator[int]:
        """Its guesses at temperature 0, looked up as they are asked for; where it samples nothing is certain."""
        del prospect
        return self._guesses(row.tokens[-self.table.order :], limit)

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        limits = [plan.limit for plan in plans]
        if _quick(context.sampling):
            tails = [row.tokens[-self.table.order :] for row in rows]
            drafts = [list(self._guesses(tail, limit)) for tail, limit in zip(tails, limits, strict=True)]
            return padded_proposal(drafts, context.device, [[] for _ in rows])
        drafts, laws = self._sampled(rows, limits, context)
        return padded_proposal(drafts, context.device, laws)

    def _guesses(self, tail: list[int], limit: int) -> Iterator[int]:
        for _ in range(limit):
            guess = self.table.best(tail)
            yield guess
            tail = [*tail, guess][-self.table.order :]

    def _sampled(
        self, rows: Many[DraftRow], limits: Many[int], context: DraftContext
    ) -> tuple[list[list[int]], list[list[Tensor]]]:
        """A token of each row at a time, by the next number of its own stream, up to a place where it has no law. → what is
        drawn, and the laws [1, V]
        """
        drafted: list[list[int]] = [[] for _ in rows]
        laws: list[list[Tensor]] = [[] for _ in rows]
        drafting = list(range(len(rows)))
        for step in range(max(limits)):
            drafting = [i for i in drafting if step < limits[i] and len(drafted[i]) == step]
            if not drafting:
                break
            law = self._laws([rows[i] for i in drafting], [drafted[i] for i in drafting], context)
            positions = [rows[i].position + step for i in drafting]
            tokens = draw_each(law, [rows[i].stream for i in drafting], positions).tolist()
            for place, i in enumerate(drafting):
                if tokens[place] >= 0:
                    laws[i].append(law[place : place + 1])
                    drafted[i].append(tokens[place])
        return drafted, laws

    def _laws(self, rows: Many[DraftRow], drafted: Many[list[int]], context: DraftContext) -> Tensor:
        """The table's laws standardised as the target's are, over the target's vocabulary. [R, V], float32

        In the type that our kernels read: drawn, kept and tested by the same numbers, it is as exact as any.
        """
        sampling, reach = context.sampling, self.table.order
        tails = [[*row.tokens[-reach:], *new] for row, new in zip(rows, drafted, strict=True)]
        shares = np.stack([self.table.law(tail).astype(np.float32) for tail in tails])
        counted = torch.from_numpy(shares).to(context.device).log()
        short = max(0, context.vocab_size - counted.shape[1])
        logits = torch.nn.functional.pad(counted, (0, short), value=-torch.inf)[:, : context.vocab_size]
        contexts = None
        if sampling.needs_context:
            contexts = [
                row.context(to_device([*row.tokens, *new], context.device, torch.long), len(new))
                for row, new in zip(rows, drafted, strict=True)
            ]
        return standardize(logits, sampling, contexts)


def _quick(sampling: SamplingSettings) -> bool:
    """Whether the table's own guess will do: nothing but the temperature shapes the law, and that is 0."""
    return sampling.greedy and not sampling.needs_context and not sampling.logit_bias
