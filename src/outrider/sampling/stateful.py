"""Processors that keep a state along a sequence, made functions of the tokens alone so that they roll back with it.

Speculation asks for the law at positions that are then taken back, and at the same position for draft and target. Both
classes here remember states by the tokens that led to them, so the answer depends on the tokens only.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.settings.sampling import KeepsState
from outrider.support.beginnings import common_length

REMEMBERED = 256  # sequences
MOST_BACK, NEAR = 32, 4  # tokens taken back where a new beginning would do; tokens by which one sequence goes on
COPIES = 1024  # positions


class Matcher(Protocol):
    """A constraint's state along the new tokens of one sequence."""

    def mask(self) -> Tensor | None:
        """Which tokens may come next, bool [V]; None if it can't tell, and never will again: it is made anew."""

    def advance(self, token: int) -> bool:
        """Take a token; False, and no change, if it may not come. True where it can't tell: `mask` says so."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""


@dataclass
class _Trail:
    """A matcher and the tokens it has taken."""

    matcher: Matcher
    tokens: list[int] = field(default_factory=list)


class Constraint(KeepsState):
    """A grammar, schema or automaton over the new tokens: forbids what may not come next.

    start: makes a matcher for a new sequence. A position after a token that may not come is never reached, so its scores
    are left as they are; where a matcher can't tell what may come (`Matcher.mask`), nothing may. tokens: whose they are
    (`models.compatibility.fingerprint`), to be refused by other models.
    """

    constrains = True

    def __init__(self, start: Callable[[], Matcher], tokens: str | None = None) -> None:
        self._start = start
        self.tokens = tokens
        self._trails: list[_Trail] = []

    def apply(self, tokens: Tensor, prompt_length: int, scores: Tensor) -> Tensor:
        matcher = self._matcher(tokens[prompt_length:].tolist())
        if matcher is None:
            return scores
        mask = matcher.mask()
        if mask is None:
            self._trails = [one for one in self._trails if one.matcher is not matcher]
            return torch.full_like(scores, -torch.inf)
        mask = mask.to(scores.device)
        short = scores.shape[-1] - mask.shape[-1]
        if short > 0:
            mask = torch.nn.functional.pad(mask, (0, short), value=False)
        return scores.masked_fill(~mask[: scores.shape[-1]], -torch.inf)

    def _matcher(self, new: list[int]) -> Matcher | None:
        """A matcher that has taken exactly these tokens; None if they can't be taken."""
        trail = self._trail(new)
        same = common_length(trail.tokens, new)
        if same < len(trail.tokens):
            trail.matcher.rollback(len(trail.tokens) - same)
            del trail.tokens[same:]
        taken = True
        for token in new[same:]:
            taken = trail.matcher.advance(token)
            if not taken:
                break
            trail.tokens.append(token)
        self._trails.append(trail)
        del self._trails[:-REMEMBERED]
        return trail.matcher if taken else None

    def _trail(self, new: list[int]) -> _Trail:
        """The trail of the sequence that these tokens belong to, as far as can be told; those in use are the last ones.

        It is taken out until matcher and tokens agree again: one that an interrupt parts is forgotten.
        """
        found, least = None, len(new) + MOST_BACK  # from there it is nearer from the beginning
        for i in range(len(self._trails) - 1, -1, -1):
            held = self._trails[i].tokens
            same = common_length(held, new)
            back, forth = len(held) - same, len(new) - same
            if back and forth > NEAR:  # another sequence's, which has gone on elsewhere and will come back
                continue
            if back + forth < least:
                found, least = i, back + forth
            if least <= NEAR:
                break  # none of hundreds that have ended would be so much nearer
        return _Trail(self._start()) if found is None else self._trails.pop(found)


class StatefulProcessor(KeepsState):
    """Any Hugging Face `LogitsProcessor` that keeps a state, called once per position and in order by its own lights.

    make: a fresh one. Copies are kept by the tokens they have seen, so it must be possible to `copy.deepcopy` it, and its
    state must follow from the tokens: positions that were forgotten are shown to it again with scores of 0.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._after: OrderedDict[tuple[int, tuple[int, ...]], Any] = OrderedDict()

    def apply(self, tokens: Tensor, prompt_length: int, scores: Tensor) -> Tensor:
        ids = tuple(tokens.tolist())
        processor, known = self._before(ids, prompt_length)
        for length in range(known, len(ids)):  # positions that were never asked for: only their tokens matter
            processor(tokens[None, :length], torch.zeros_like(scores)[None])
        out: Tensor = processor(tokens.unsqueeze(0), scores.unsqueeze(0).clone())[0].to(scores.dtype)
        self._after[prompt_length, ids] = processor
        self._after.move_to_end((prompt_length, ids))
        while len(self._after) > COPIES:
            self._after.popitem(last=False)
        return out

    def _before(self, ids: tuple[int, ...], prompt_length: int) -> tuple[Any, int]:
        """A copy that has seen a beginning of the tokens, and how many of them come next."""
        for length in range(len(ids) - 1, prompt_length - 1, -1):
            if (seen := self._after.get((prompt_length, ids[:length]))) is not None:
                return copy.deepcopy(seen), length + 1
        return self._make(), prompt_length
