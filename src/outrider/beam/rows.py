"""Hypotheses as rows of one ragged batch: which sequence of a model scores which, and what must be scored again.

Hypotheses share beginnings, and sequences can't be split. So each path to be scored is given to the open sequence that has
most of it, which is truncated to what they share; what is missing is copied from another sequence where the engine can
(`models.base.CopiesPrefixes`) and scored again in the same pass where it can't. Nothing else is asked of an engine.

Several hypotheses on one path (a draft's, one the beginning of another) are scored by one row.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from outrider.beam.laws import continuations
from outrider.beam.state import Continuations, Path
from outrider.beam.task import BeamTask
from outrider.models.base import (
    CopiesPrefixes,
    LanguageModel,
    Sequence,
    fit_vocabulary,
    has_encoder,
    known_tokens,
    open_sequence,
)
from outrider.prefill import prefill
from outrider.support.beginnings import common_length
from outrider.support.device_data import index, pad_rows


@dataclass
class _Row:
    """An open sequence. new: the new tokens that it holds or held; what counts is the sequence's length."""

    sequence: Sequence
    new: Path = ()


@dataclass
class _Leaf:
    """A path to be scored. wanted: the hypotheses along it whose continuations are asked for, shortest first."""

    path: Path
    wanted: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """What passes have cost. rows: of the pass. scored: tokens scored, those scored again included. again: those alone."""

    passes: int = 0
    rows: int = 0
    scored: int = 0
    again: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in ("passes", "rows", "scored", "again")))


class BeamRows:
    """The open sequences of one model for one search. vocab_size: the width of the laws. limit: of new tokens."""

    def __init__(self, model: LanguageModel, task: BeamTask, vocab_size: int, limit: int) -> None:
        self.model = model
        self._task = task
        self._prompt = known_tokens(task.prompt if has_encoder(model) else task.reading, model.vocab_size)
        self._vocab_size = vocab_size
        self._reserve = len(self._prompt) + limit
        self._rows: list[_Row] = []

    def fits(self, new_tokens: int) -> bool:
        """Whether the model can score hypotheses of so many."""
        return self.model.max_length is None or len(self._prompt) + new_tokens <= self.model.max_length

    def begin(self) -> None:
        """Read the prompt."""
        self._open(1)

    def close(self) -> None:
        """Close all sequences."""
        while self._rows:
            self._rows.pop().sequence.close()

    def laws(self, hypotheses: Many[Path], count: int) -> tuple[dict[Path, Continuations], Work]:
        """The `count` best continuations of each hypothesis that has a law, in one pass. → them, and what the pass cost"""
        leaves = _leaves(hypotheses)
        self._open(len(leaves))
        rows = self._assign([leaf.path for leaf in leaves])
        parts: list[list[int]] = []
        for row, leaf in zip(rows, leaves, strict=True):
            row.sequence.truncate(min(row.sequence.length, len(self._prompt) + len(leaf.wanted[0]) - 1))
            whole = [*self._prompt, *known_tokens(list(leaf.path), self.model.vocab_size)]
            parts.append(whole[row.sequence.length :])
        starts = [row.sequence.length for row in rows]
        tokens, lengths = pad_rows(parts, self.model.device)
        logits = self.model.score([row.sequence for row in rows], tokens, lengths, "all")
        assert logits is not None
        for row, leaf in zip(rows, leaves, strict=True):
            row.new = leaf.path
        places = [
            (i, len(self._prompt) + len(path) - 1 - starts[i], path) for i, leaf in enumerate(leaves) for path in leaf.wanted
        ]
        device = logits.device
        at = (index([i for i, _, _ in places], device), index([column for _, column, _ in places], device))
        asked = fit_vocabulary(logits[at], self._vocab_size)
        found = continuations(self._task.law.logprobs(asked, [path for _, _, path in places]), count)
        work = Work(1, len(rows), sum(lengths), sum(lengths) - len(places))
        return {path: law for (_, _, path), law in zip(places, found, strict=True) if law is not None}, work

    def _open(self, count: int) -> None:
        """That many sequences at least, each with the prompt but its last token."""
        fresh: list[_Row] = []
        while len(self._rows) < count:
            row = _Row(open_sequence(self.model, self._task.source, self._reserve))
            self._rows.append(row)
            if len(self._rows) > 1 and isinstance(self.model, CopiesPrefixes):
                self.model.copy_prefix(self._rows[0].sequence, row.sequence, len(self._prompt) - 1)
            else:
                fresh.append(row)
        prefill(self.model, [row.sequence for row in fresh], [self._prompt[:-1]] * len(fresh))

    def _shared(self, row: _Row, path: Path) -> int:
        """Tokens of prompt and path that the row's sequence holds."""
        return min(row.sequence.length, len(self._prompt) + common_length(row.new, path))

    def _assign(self, paths: list[Path]) -> list[_Row]:
        """A row for each path, holding as much of it as any row does, or (without copying) as itself does.

        Where an engine copies, only the first rows are given out: rows that lie side by side in a cache are scored where
        they are, others would be gathered from all of it in every layer.
        """
        copies = isinstance(self.model, CopiesPrefixes)
        first = len(paths) if copies else len(self._rows)
        pairs = [(self._shared(row, path), -i, -j) for i, path in enumerate(paths) for j, row in enumerate(self._rows)]
        chosen: dict[int, int] = {}
        sources: dict[int, tuple[int, int]] = {}
        for shared, i, j in sorted(pairs, reverse=True):
            sources.setdefault(-i, (shared, -j))  # the row that has most of the path, before it is changed
            if -j < first and -i not in chosen and -j not in chosen.values():
                chosen[-i] = -j
        rows = [self._rows[chosen[i]] for i in range(len(paths))]
        for row, path in zip(rows, paths, strict=True):
            row.sequence.truncate(self._shared(row, path))
        if isinstance(self.model, CopiesPrefixes):
            # No copy reads what another one writes: a row was given to nobody, or was given away because it shares at least
            # as much with the path that it went to, and only what lies beyond that is written.
            for i, row in enumerate(rows):
                shared, source = sources[i]
                if shared > row.sequence.length:
                    self.model.copy_prefix(self._rows[source].sequence, row.sequence, shared)
        return rows


def _leaves(hypotheses: Many[Path]) -> list[_Leaf]:
    """The hypotheses by paths, so that one which begins another is on the other's."""
    leaves: list[_Leaf] = []
    for path in sorted(set(hypotheses), key=len, reverse=True):
        home = next((leaf for leaf in leaves if leaf.path[: len(path)] == path), None)
        if home is None:
            leaves.append(home := _Leaf(path))
        home.wanted.insert(0, path)
    return leaves
