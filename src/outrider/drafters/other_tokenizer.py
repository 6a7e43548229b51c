"""Draft models whose vocabulary differs from the target's, losslessly, in two ways (Timor et al. 2025).

*Intersection*: the draft samples from its own law restricted to the tokens that both vocabularies have, and
renormalised. That is a true law over the target's tokens, so the ratio rule applies as ever.

*Text* (the default): the draft writes freely, and the target's tokenizer cuts what it wrote. Nobody knows the probability of
a token that came about in this way, so each is a point mass: accepted with the target's own probability of it. That is exact
whatever proposed it, but a token that the target would rather vary is accepted less often. On real pairs it does better all
the same: where one vocabulary joins a colon and the line's end and the other does not, no shared token is the one that the
target would say (EXPERIMENTS.md).

Both read the same text: the target's tokens are turned into text and cut by the draft's tokenizer, and the draft's cache
goes back to where the two cuts part.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.costs import Costs, DraftSeconds, measured_costs
from outrider.draft_length.base import Plan, Prospect
from outrider.draft_steps.own_tokens import OwnTokens
from outrider.draft_steps.signals import token_signals
from outrider.draft_steps.steps import Steps
from outrider.drafters.base import DraftContext, Drafter
from outrider.drafters.drafting import draft_in_steps, room_after
from outrider.drafters.model import catch_up, draft_seconds, seconds_after
from outrider.errors import VocabularyMismatchError
from outrider.models.base import LanguageModel, Sequence, has_encoder
from outrider.models.token_bytes import token_bytes
from outrider.prefill import prefill
from outrider.proposal import DraftRow, Proposal, padded_proposal
from outrider.sampling import SamplingSettings
from outrider.support.beginnings import common_length
from outrider.support.device_data import index, pad_rows

FEWEST = 256  # tokens in common, below which the intersection is no draft
ANCHOR = 24  # target tokens re-read before what was drafted, so that the cut between them falls as it would


@dataclass
class _Reader:
    """A row in the draft's tokens: the sequence in the draft model, and the ids it holds."""

    sequence: Sequence
    held: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    read: int = 0  # target tokens that `wanted` was made from


class _ForeignDrafter(Drafter):
    """What both ways share: the draft model reads the target's text."""

    suffix = ""

    def __init__(self, model: Any, step_seconds: float | None = None) -> None:
        self.model: LanguageModel = model
        self.name = f"{model.name}{self.suffix}"
        self._tokenizer: Any = model.tokenizer
        self._costs = Costs({1: step_seconds}) if step_seconds is not None else None
        self._measures = step_seconds is None
        self._target: Any = None

    def bind(self, target: Any) -> None:
        if getattr(target, "tokenizer", None) is None or self._tokenizer is None:
            raise VocabularyMismatchError(
                f"draft {self.model.name} and target {target.name} must both have tokenizers to draft across vocabularies"
            )
        if has_encoder(self.model):
            raise VocabularyMismatchError(
                f"draft {self.model.name} has another tokenizer than target {target.name}, and an encoder, which is to read "
                "the target's source: name a draft with the target's tokenizer, or a decoder-only one"
            )
        if self._target is not target:
            self._target = target
            self._prepare(target)

    @abstractmethod
    def _prepare(self, target: Any) -> None:
        """Compare the vocabularies."""

    def measure(self) -> None:
        if self._measures:
            self._costs = measured_costs(self.model)

    @property
    def seconds(self) -> DraftSeconds:
        return draft_seconds(self._costs)

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        for row in rows:
            row.state = _Reader(self.model.open())
            self._read(row)
        if context.late:
            return
        fitting = [row.state for row in rows if self._room(row) > 0]
        with context.clock.phase("prefill"):
            prefill(self.model, [reader.sequence for reader in fitting], [reader.wanted[:-1] for reader in fitting])
        for reader in fitting:
            reader.held = reader.wanted[:-1]

    def _text(self, row: DraftRow) -> str:
        """What there is to read: the target's text; of an encoder-decoder the source and, on the next line, the text."""
        tokenizer, source = self._target.tokenizer, row.source_tokens
        alone: str = tokenizer.decode(row.tokens, skip_special_tokens=bool(source), clean_up_tokenization_spaces=False)
        if not source:
            return alone
        before: str = tokenizer.decode(source, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return f"{before}\n{alone}"

    def _read(self, row: DraftRow) -> _Reader:
        """Cut the row's text into the draft's tokens, and take back what the draft model holds of another cut."""
        reader: _Reader = row.state
        if reader.read != len(row.tokens):
            ids = self._tokenizer.encode(self._text(row), add_special_tokens=False)
            reader.wanted = [int(i) for i in ids] or [0]
            reader.read = len(row.tokens)
        same = common_length(reader.held, reader.wanted)
        same = min(same, len(reader.wanted) - 1)  # the last one is scored anew, for its logits
        if same < len(reader.held):
            del reader.held[same:]
            reader.sequence.truncate(min(reader.sequence.length, same))
        return reader

    def _room(self, row: DraftRow) -> int:
        return room_after(self.model, len(row.state.wanted))

    def prospects(self, row: DraftRow) -> list[Prospect]:
        reader = self._read(row)
        pending = len(reader.wanted) - len(reader.held)
        step, start, behind = seconds_after(self._costs, pending, len(reader.wanted))
        return [
            Prospect(
                self.name,
                first=0.6,
                later=0.6,
                step_seconds=step,
                start_seconds=start,
                behind_seconds=behind,
                longest=self._room(row),
                gated=self.model.device.type == "cpu",
            )
        ]

    def _next_logits(self, readers: Many[_Reader], drafted: Many[list[int]]) -> Tensor:
        """Score what the draft model has not seen of each text and of its own draft. → [R, V']"""
        known = [[*reader.wanted, *own] for reader, own in zip(readers, drafted, strict=True)]
        catch_up(self.model, [reader.sequence for reader in readers], known)
        for reader, text in zip(readers, known, strict=True):
            reader.held += text[len(reader.held) : reader.sequence.length]
        pending = [tokens[len(reader.held) :] for tokens, reader in zip(known, readers, strict=True)]
        tokens, lengths = pad_rows(pending, self.model.device)
        logits = self.model.score([reader.sequence for reader in readers], tokens, lengths, "last")
        assert logits is not None
        for reader, tokens_known in zip(readers, known, strict=True):
            reader.held = tokens_known
        return logits[:, 0]

    def observe(self, rows: Many[DraftRow]) -> None:
        for row in rows:
            row.state.read = -1  # inside another drafter the tokens may have changed and not their number

    def end(self, row: DraftRow) -> None:
        if row.state is not None:
            row.state.sequence.close()


class IntersectionDrafter(_ForeignDrafter):
    """Drafts with the tokens that both vocabularies have. sampling: the draft's own, None: the target's."""

    def __init__(self, model: Any, sampling: SamplingSettings | None = None, step_seconds: float | None = None) -> None:
        super().__init__(model, step_seconds)
        self._sampling = sampling

    def _prepare(self, target: Any) -> None:
        ours, theirs = token_bytes(target.tokenizer), token_bytes(self._tokenizer)
        pairs = [(ours[raw], theirs[raw]) for raw in ours.keys() & theirs.keys()]
        pairs = sorted((a, b) for a, b in pairs if a < target.vocab_size and b < self.model.vocab_size)
        if len(pairs) < min(FEWEST, target.vocab_size // 4):
            raise VocabularyMismatchError(
                f"draft {self.model.name} and target {target.name} have only {len(pairs)} tokens in common: use a draft of "
                "the target's family, or the draft prompt-lookup"
            )
        ends = (target.tokenizer.eos_token_id, self._tokenizer.eos_token_id)
        there = None not in ends and int(ends[0]) < target.vocab_size and int(ends[1]) < self.model.vocab_size
        if there and int(ends[0]) not in {a for a, _ in pairs}:
            pairs = sorted([*pairs, (int(ends[0]), int(ends[1]))])  # both say that the text ends
        self.shared = len(pairs)
        self._ours = index([a for a, _ in pairs], self.model.device)
        self._theirs = index([b for _, b in pairs], self.model.device)
        self._translation = dict(pairs)

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        readers = [self._read(row) for row in rows]
        limits = [min(plan.limit, self._room(row)) for row, plan in zip(rows, plans, strict=True)]
        sampling = self._sampling or context.sampling
        whole = not sampling.as_they_are
        own = OwnTokens(self.model, context.vocab_size, None if whole else self._ours, whole)

        def advance(active: list[int], steps: Steps | None) -> Tensor:
            drafted = [[] if steps is None else [self._translation.get(t, 0) for t in steps.so_far(i)] for i in active]
            logits = self._next_logits([readers[i] for i in active], drafted)[:, self._theirs]
            return self._spread(logits, context.vocab_size) if whole else logits

        return draft_in_steps(own, rows, plans, limits, sampling, context, advance)

    def _spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The draft's logits of the shared tokens, at the target's ids: settings speak of these. [A, T] → [A, V]"""
        return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, self._ours, logits)


class TextDrafter(_ForeignDrafter):
    """Drafts text greedily, cut anew by the target's tokenizer; each token a point mass."""

    suffix = " (text)"

    def _prepare(self, target: Any) -> None:
        """Any two vocabularies will do."""

    def propose(self, rows: Many[DraftRow], plans: Many[Plan], context: DraftContext) -> Proposal:
        readers = [self._read(row) for row in rows]
        limits = [min(plan.limit, self._room(row)) for row, plan in zip(rows, plans, strict=True)]
        own: list[list[int]] = [[] for _ in rows]
        signals: list[list[int]] = [[] for _ in rows]
        active = [i for i, limit in enumerate(limits) if limit > 0]
        while active:
            with context.clock.phase("draft"):
                logits = self._next_logits([readers[i] for i in active], [own[i] for i in active])
                tokens = logits.argmax(-1)
            gated = any(plans[i].gated for i in active)
            sure = token_signals(logits, tokens) if gated else [0] * len(active)
            for j, (i, token) in enumerate(zip(active, tokens.tolist(), strict=True)):
                own[i].append(token)
                signals[i].append(sure[j])
            active = [i for i in active if len(own[i]) < limits[i] and (not plans[i].gated or plans[i].go_on(signals[i]))]
        drafts = [self._cut(row, new)[:limit] for row, new, limit in zip(rows, own, limits, strict=True)]
        return padded_proposal(drafts, context.device)

    def _cut(self, row: DraftRow, new: list[int]) -> list[int]:
        """The drafted text as the target's tokens: what follows the row's own last tokens when both are cut together."""
        if not new:
            return []
        tokenizer = self._target.tokenizer
        anchor = row.tokens[-ANCHOR:]
        before = tokenizer.decode(anchor, clean_up_tokenization_spaces=False)
        text = before + self._tokenizer.decode(new, clean_up_tokenization_spaces=False)
        ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
        again = [int(i) for i in tokenizer.encode(before, add_special_tokens=False)]
        same = common_length(ids, again)
        # The row's last token may be cut otherwise together with the draft: then nothing can be appended to it.
        if same < len(again):
            return []
        size = self._target.vocab_size
        return list(itertools.takewhile(lambda token: token < size, ids[same:]))
