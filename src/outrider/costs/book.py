"""Which table decides: a run's own, wherever its parts are computed, or the one kept on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.costs.kept import held_or_measured, kept_costs
from outrider.costs.measure import LIST_ROWS, batch_sizes
from outrider.costs.pass_timer import Follows
from outrider.costs.table import Costs, PadsWidths
from outrider.models.base import LanguageModel, is_flat


@dataclass
class CostBook:
    """Tables that hold for a whole run, wherever its parts are computed: those given, and those measured for want of one.

    rows: of each pass; a table's sizes are tokens of each row. measured: of those that are measured, as many if it is None:
    passes of as many tokens in other rows cost what these do. tables: by model, not by machine. alone: the same of one row,
    as far as they were asked for. whole: of more rows, some of which have ended.
    """

    rows: int = 1
    tables: dict[str, Costs] = field(default_factory=dict)
    measured: int | None = None
    whole: CostBook | None = None
    alone: dict[str, Costs] = field(default_factory=dict)

    @classmethod
    def of_a_list(cls, rows: int) -> CostBook:
        """For so many rows that come once: few tables serve all such numbers, and take no longer than small passes."""
        return cls(rows, measured=min(1 << (rows - 1).bit_length(), LIST_ROWS[-1]))

    def of_fewer(self, rows: int) -> CostBook:
        """For so many of the rows, out of tables of one row and of all: nothing is measured but these."""
        whole = self.whole or self
        return whole if rows == whole.rows else CostBook(rows, whole=whole)

    def of(self, model: LanguageModel) -> Costs:
        """The model's table."""
        name = self.name_of(model)
        if name not in self.tables:
            # What follows another model computes the logits of each row's last token alone: as many as there are rows.
            alike = not isinstance(model, Follows)
            found = self._of_all(model, alike) if self.whole is None else self._of_few(model, alike, self.whole)
            self.tables[name] = replace(found, rows=self.rows, company=1 if is_flat(model) else self.rows)
        return self.tables[name]

    def _of_all(self, model: LanguageModel, alike: bool) -> Costs:
        measured = self.measured or self.rows
        found = held_or_measured(model, measured)
        if measured == self.rows:
            return found
        share = self.rows / measured
        return found.of_rows(share, batch_sizes(self.rows)) if alike else found.times(share)

    def _of_few(self, model: LanguageModel, alike: bool, whole: CostBook) -> Costs:
        name = self.name_of(model)
        if name not in whole.alone:
            whole.alone[name] = held_or_measured(model)
        one, many = whole.alone[name], replace(whole.of(model), rows=whole.rows)  # older runs' tables don't say it
        if self.rows == 1:
            return one
        return one.shared_by(self.rows, many, batch_sizes(self.rows)) if alike else one.towards(self.rows, many)

    @staticmethod
    def name_of(model: LanguageModel) -> str:
        """What a table is found by: the model, and what its weights were quantized to."""
        return f"{model.name} {getattr(model, 'dtype_name', '')}".strip()

    def to_dict(self) -> dict[str, dict[str, dict[str, object]]]:
        """For JSON; `from_dict` reads it back."""
        both = {"costs": self.tables, "alone": self.alone}
        return {kind: {name: one.to_dict() for name, one in tables.items()} for kind, tables in both.items()}

    @classmethod
    def from_dict(cls, rows: int, held: Mapping[str, Any]) -> CostBook:
        """What `to_dict` gave, whatever else is there; nothing of what is not."""
        tables, alone = ({n: Costs.from_dict(one) for n, one in held.get(kind, {}).items()} for kind in ("costs", "alone"))
        return cls(rows, tables, alone=alone)


_book: ContextVar[CostBook | None] = ContextVar("book", default=None)  # of this thread: others measure as ever


def book_now() -> CostBook | None:
    """The one that `measured_costs` answers from, if any."""
    return _book.get()


@contextmanager
def costs_of_a_list(rows: int) -> Iterator[None]:
    """The same for passes of so many rows, unless another book is open."""
    if rows == 1 or _book.get() is not None:
        yield
        return
    with costs_by(CostBook.of_a_list(rows)):
        yield


@contextmanager
def costs_by(book: CostBook) -> Iterator[CostBook]:
    """Let `measured_costs` answer from this book meanwhile."""
    before = _book.set(book)
    try:
        yield book
    finally:
        _book.reset(before)


def measured_costs(model: LanguageModel) -> Costs:
    """What passes of this model cost on this machine, from memory, from disk, or measured now (`measure`).

    Also lets the model pad its passes to the widths at which it is quicker, unless they have several rows (`costs_by`).
    """
    book = _book.get()
    costs = held_or_measured(model) if book is None else book.of(model)
    if not isinstance(model, PadsWidths):
        return costs
    if book is not None and (book.rows > 1 or book.whole is not None):
        model.pad_widths(lambda tokens, context: tokens)  # noqa: ARG005
        return costs
    padded = replace(costs, padded=True)
    _pad(model, padded)
    return padded


def pad_as_known(model: LanguageModel) -> None:
    """Let passes be as wide as they are with drafts (`measured_costs`), if that is known: nothing is measured for it."""
    if _book.get() is None and isinstance(model, PadsWidths) and (costs := kept_costs(model)) is not None:
        _pad(model, costs)


def _pad(model: PadsWidths, costs: Costs) -> None:
    model.pad_widths(costs.width)
