"""What a drafter is shown of a sequence, and what it proposes for a round."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.models.base import Sequence, Source, tokens_of
from outrider.randomness import RandomStream, keys_of
from outrider.sampling.penalties import Context, State
from outrider.support.device_data import index, moved, pad_rows


@dataclass
class DraftRow:
    """One sequence as its drafter sees it.

    tokens: prompt and output so far (shared with the decoder, never changed here). stream: the row's randomness, from
    which every draw takes fresh numbers. sequence: the target's own. state: the drafter's. uncertain: how many of the last
    tokens may be taken back, inside a drafter that is itself a speculative decoder. source: what the target's encoder read.
    drawn: of the last tokens, how many the last round drew by the target's law rather than keep from the draft.
    provisional: of the last tokens that the target's sequence holds, how many are to be scored anew by the next pass.
    ends: tokens that end the text. shift: how many of the tokens the target does not hold, but reads by its encoder.
    """

    tokens: list[int]
    prompt_length: int
    stream: RandomStream
    sequence: Sequence
    state: Any = None
    uncertain: int = 0
    source: Source | None = None
    drawn: int = 1
    provisional: int = 0
    ends: frozenset[int] = frozenset()
    shift: int = 0

    @property
    def position(self) -> int:
        """Of the next token, in the target's text: what it is drawn by, where that is decided by position."""
        return len(self.tokens) - self.shift

    def context(self, tokens: Tensor, drafted: int, state: State = "certain") -> Context:
        """What the law at a place depends on. tokens: before it; drafted: of these, those behind the row's own."""
        return Context(tokens, self.prompt_length, state, self.uncertain + drafted, self.ends)

    @property
    def certain(self) -> int:
        """How many of the tokens stay for good."""
        return len(self.tokens) - self.uncertain

    @property
    def source_tokens(self) -> list[int]:
        """The source, as far as it is text."""
        return tokens_of(self.source)

    @property
    def reading(self) -> list[int]:
        """All that there is to read, from left to right: source and tokens. For drafters that have no encoder."""
        return self.tokens if self.source is None else [*self.source_tokens, *self.tokens]


def races_of(rows: Many[DraftRow], further: Many[int] = ()) -> tuple[list[int], list[int]] | None:
    """By what the next token of each row is drawn where that is decided by position: keys and positions; else None.

    further: how many tokens after the next one, of each row.
    """
    keys = keys_of([row.stream for row in rows])
    if keys is None:
        return None
    return keys, [row.position + more for row, more in zip(rows, further or [0] * len(rows), strict=True)]


Candidate = tuple[int, int, int]


@dataclass(frozen=True)
class Alternatives:
    """What a draft might have said instead, for R rows: scored in the same pass, tested by nothing.

    If a drafted token is rejected and the recovered one is among those for its place, the token after it is known, too
    (`round`). So they may be chosen in any way that does not look at the randomness of the verification.

    tokens: int64 [R, M], row i's in the first len(places[i]) columns. places: per row and alternative, the drafted token
    (from 0) in whose place it stands.
    """

    tokens: Tensor
    places: list[list[int]]

    def count(self, row: int) -> int:
        """How many a row has."""
        return len(self.places[row])


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens for R rows.

    tokens: int64 [R, K] on the target's device, row i's in the first lengths[i] columns. probs: [R, K, V], the laws they
    were drawn from, or None if all are certain: a point mass each. signals: per row, one per token, if the drafter is
    gated. beside: alternatives to them, if there are any. candidates: per row, all that might have been one, scored or not,
    as (token, place, class of how likely the draft held it): whether they come is learned from either. known: each row's
    tokens as numbers, where the drafter has them.
    """

    tokens: Tensor
    lengths: list[int]
    probs: Tensor | None = None
    signals: list[list[int]] | None = None
    beside: Alternatives | None = None
    candidates: list[list[Candidate]] | None = None
    known: list[list[int]] | None = field(default=None, init=False)  # `replace` must not keep it beside other tokens

    def knowing(self, drafts: list[list[int]] | None) -> Proposal:
        """The same, with each row's tokens as numbers; None: they are on the device alone."""
        object.__setattr__(self, "known", drafts)
        return self

    def on_host(self) -> list[list[int]]:
        """Each row's tokens as numbers. Reads back what is not known."""
        if self.known is not None:
            return self.known
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths, strict=True)]


def empty_proposal(rows: int, device: torch.device) -> Proposal:
    """No tokens for anybody."""
    return Proposal(torch.zeros(rows, 0, dtype=torch.long, device=device), [0] * rows).knowing([[] for _ in range(rows)])


def one_below_the_other(parts: Many[Proposal]) -> Proposal:
    """Those of several groups of rows, as far as a pass needs them: without laws, signals and candidates."""
    width, rows = max(part.tokens.shape[1] for part in parts), sum(len(part.lengths) for part in parts)
    tokens = torch.cat([torch.nn.functional.pad(part.tokens, (0, width - part.tokens.shape[1])) for part in parts])
    beside, at = [], 0
    for part in parts:
        beside.append((range(at, at + len(part.lengths)), part.beside))
        at += len(part.lengths)
    known = [draft for part in parts for draft in part.known or ()]
    lengths = [length for part in parts for length in part.lengths]
    whole = Proposal(tokens, lengths, beside=merged_alternatives(beside, rows, tokens.device))
    return whole.knowing(known if len(known) == rows else None)


def padded_proposal(
    drafts: Many[Many[int]],
    device: torch.device,
    laws: Many[Many[Tensor]] = (),
    signals: list[list[int]] | None = None,
) -> Proposal:
    """What was drafted row by row. laws: of each row's tokens in turn, [n, V] each; none of any row: a point mass each."""
    if not any(drafts):
        return empty_proposal(len(drafts), device)
    tokens, lengths = pad_rows(drafts, device)
    probs = moved(_side_by_side(laws, tokens.shape[1]), device) if any(laws) else None
    return Proposal(tokens, lengths, probs, signals).knowing([list(draft) for draft in drafts])


def _side_by_side(laws: Many[Many[Tensor]], width: int) -> Tensor:
    """Each row's laws one after the other, padded with zeros. → [R, K, V]"""
    some = next(law for row in laws for law in row)
    out = some.new_zeros(len(laws), width, some.shape[-1])
    for i, row in enumerate(laws):
        if row:
            law = torch.cat(list(row))
            out[i, : len(law)] = law
    return out


def padded_alternatives(rows: Many[Many[Candidate]], device: torch.device) -> Alternatives | None:
    """Of those chosen for each row; None if nobody has any."""
    if not any(rows):
        return None
    tokens, _ = pad_rows([[token for token, *_ in row] for row in rows], device)
    return Alternatives(tokens, [[place for _, place, _ in row] for row in rows])


def merged_alternatives(
    parts: Many[tuple[Many[int], Alternatives | None]], rows: int, device: torch.device
) -> Alternatives | None:
    """Of several drafters: each part's rows among all, and their alternatives."""
    width = max((part.tokens.shape[1] for _, part in parts if part is not None), default=0)
    if width == 0:
        return None
    merged = Alternatives(torch.zeros(rows, width, dtype=torch.long, device=device), [[] for _ in range(rows)])
    for mine, part in parts:
        if part is not None:
            merged.tokens[index(mine, device), : part.tokens.shape[1]] = part.tokens
            for i, places in zip(mine, part.places, strict=True):
                merged.places[i] = places
    return merged
