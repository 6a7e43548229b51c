"""Which table decides: a run's own, wherever its parts are computed, or the one kept on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from outrider.costs.kept import held_or_measured, kept_costs
from outrider.costs.table import Costs, PadsWidths
from outrider.models.base import LanguageModel, is_flat


@dataclass
class CostBook:
    """Tables that hold for a whole run, wherever its parts are computed: those given, and those measured for want of one.

    rows: of each pass that is measured; a table's sizes are tokens of each row. tables: by model, not by machine.
    """

    rows: int = 1
    tables: dict[str, Costs] = field(default_factory=dict)

    def of(self, model: LanguageModel) -> Costs:
        """The model's table."""
        name = self.name_of(model)
        if name not in self.tables:
            found = held_or_measured(model, self.rows)
            self.tables[name] = found if is_flat(model) else replace(found, company=self.rows)
        return self.tables[name]

    @staticmethod
    def name_of(model: LanguageModel) -> str:
        """What a table is found by: the model, and what its weights were quantized to."""
        return f"{model.name} {getattr(model, 'dtype_name', '')}".strip()

    def to_dict(self) -> dict[str, dict[str, object]]:
        """For JSON; `from_dict` reads it back."""
        return {name: one.to_dict() for name, one in self.tables.items()}

    @classmethod
    def from_dict(cls, rows: int, held: Mapping[str, Mapping[str, Any]]) -> CostBook:
        """What `to_dict` gave."""
        return cls(rows, {name: Costs.from_dict(one) for name, one in held.items()})


_book: ContextVar[CostBook | None] = ContextVar("book", default=None)  # of this thread: others measure as ever


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
    if book is not None and book.rows > 1:
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
    model.pad_widths(lru_cache(maxsize=4096)(costs.width))
