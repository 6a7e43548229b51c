"""What a pass costs here: the table, how it is measured, where it is kept, and which one decides in a run."""

from outrider.costs.book import CostBook, book_now, costs_by, costs_of_a_list, measured_costs, pad_as_known
from outrider.costs.draft_seconds import DraftSeconds
from outrider.costs.kept import forget_costs, kept_costs, review_costs
from outrider.costs.shared import ByRows, SharedCosts
from outrider.costs.table import CONTEXT, Costs

__all__ = [
    "CONTEXT",
    "ByRows",
    "CostBook",
    "Costs",
    "DraftSeconds",
    "SharedCosts",
    "book_now",
    "costs_by",
    "costs_of_a_list",
    "forget_costs",
    "kept_costs",
    "measured_costs",
    "pad_as_known",
    "review_costs",
]
