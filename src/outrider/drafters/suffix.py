"""Copying with a suffix automaton: the longest match in prompt, output, earlier turns and stored outputs.

Where prompt lookup remembers n-grams of a few lengths, this finds the longest earlier occurrence of the text's end at any
length, in amortised constant time a token. Deterministic, hence a point mass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

from outrider.draft_length.base import Prospect
from outrider.drafters.copying import CopyDrafter, CopyState, copy_prospect
from outrider.drafters.suffix_automaton import ROOT, SuffixAutomaton
from outrider.drafters.token_store import TokenStore
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel
from outrider.models.compatibility import fingerprint
from outrider.proposal import DraftRow
from outrider.support.checks import check_count

_log = logging.getLogger(__name__)


@dataclass
class _Match(CopyState):
    """A row's own automaton, and how its end matches the memory: (state, length) after so many certain tokens."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    state: int = ROOT
    length: int = 0


class SuffixDrafter(CopyDrafter):
    """Continues the longest earlier occurrence of the text's end.

    memory: True keeps the texts of finished generations for later ones with this drafter (a conversation); what a seed
    gives then depends on what was generated before (the law does not: `occasion`). store: a file that keeps them across
    processes, implies memory. min_match: shorter matches propose nothing.
    """

    name = "suffix"

    def __init__(self, memory: bool = False, store: str | Path | None = None, min_match: int = 1) -> None:
        check_count("min_match", min_match)
        self.min_match = min_match
        self.remembers = memory or store is not None
        self._path = Path(store) if store is not None else None
        self._store: TokenStore | None = None
        self._memories: dict[str, SuffixAutomaton] = {}
        self._memory: SuffixAutomaton | None = None
        self._writing = RLock()  # of all copies: those for other targets hold no lock in common

    @property
    def forgets_at_exit(self) -> bool:
        """Whether what it remembers is lost with the process."""
        return self.remembers and self._path is None

    def occasion(self) -> Many[int]:
        """With a store also how much was in it: other processes wrote that."""
        return (*super().occasion(), *([self._store.count()] if self._store is not None else []))

    def bind(self, target: LanguageModel) -> None:
        """Choose the memory that was written in the target's tokens."""
        if not self.remembers:
            return
        tokens = fingerprint(target)
        if self._path is not None:
            self._store = TokenStore(self._path, tokens)
        with self._writing:
            if tokens not in self._memories:
                self._memories[tokens] = SuffixAutomaton(self._store.read() if self._store else ())
            elif (whole := self._memories[tokens].before_interrupt()) is not None:
                self._memories[tokens] = SuffixAutomaton(whole)
            self._memory = self._memories[tokens]

    def _start(self, drawn: float) -> _Match:
        return _Match(drawn)

    def prospects(self, row: DraftRow) -> list[Prospect]:
        return [copy_prospect(self.name, self._source(row)[2], row.state.drawn)]

    def _continue(self, row: DraftRow, limit: int) -> list[int]:
        text, source, length = self._source(row)
        copied: list[int] = []
        for at in range(source, source + limit) if length else ():
            if at < len(text.tokens):
                copied.append(text.tokens[at])
            elif text is row.state.own:  # the copy runs into the text's end, and into itself
                copied.append([*row.tokens[row.certain :], *copied][at - len(text.tokens)])
            else:
                break
        return copied

    def _source(self, row: DraftRow) -> tuple[SuffixAutomaton, int, int]:
        """Where to copy from: the text, the position in it, and the length of the match (0 for none)."""
        match: _Match = row.state
        own, memory = match.own, self._memory
        tokens = row.reading
        for token in tokens[len(own) : len(tokens) - row.uncertain]:
            own.append(token)
            if memory is not None:
                match.state, match.length = memory.step(match.state, match.length, token)
        found = [(own, *own.end_match())]
        if memory is not None:
            found.append((memory, match.state, match.length))
        best = (own, 0, 0)
        for text, state, length in found:
            for token in row.tokens[row.certain :]:
                state, length = text.step(state, length, token)  # noqa: PLW2901 - followed through the uncertain tokens
            if length > best[2] and length >= self.min_match and text.occurrence(state) < len(text.tokens):
                best = (text, text.occurrence(state), length)
        return best

    def end(self, row: DraftRow) -> None:
        if self._memory is None or row.state is None:
            return
        tokens = row.reading
        with self._writing:
            if self._memory.before_interrupt() is not None:
                return
            self._memory.extend(tokens)
        if self._store is not None:
            try:
                self._store.append(tokens)
            except ParameterError as error:
                _log.warning("an output is not kept: %s", error)
