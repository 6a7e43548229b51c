"""What was measured, as one page: the papers' tables and figures from logs, beside the numbers that the papers print.

Made of what `bench sweep`, `tasks`, `alpha` and `toyllm` left (`measured_logs`). Nothing is computed anew but ratios, and no
model is loaded. Parts without a log say so, name the command that measures them, and still show the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.report.measured_chen import figure_1, table_1
from outrider.report.measured_leviathan import table_2, table_3, table_4
from outrider.report.measured_logs import Measurement, missing
from outrider.report.measured_toyllm import article
from outrider.report.measured_trace import figure_5
from outrider.report.page import DataTable, Page, Section

_MACHINE = ("processor", "cores", "threads", "device", "python", "torch", "transformers", "outrider")


def page(measured: Sequence[Measurement]) -> Page:
    """The whole report."""
    lead = (
        "The experiments of Chen et al. 2023, Leviathan et al. 2022 and the toyllm article, measured here, beside what they "
        "print. Their machines and models are others: what can be held against them are ratios, rates and shapes, not "
        "milliseconds. Shaded rows are theirs.",
        "Speed-ups are medians over prompts of plain time over speculative time, with quartiles; quality and α have 95 % "
        "intervals over prompts; ± is a standard deviation. Reading the prompt is left out, except in the toyllm article's "
        "experiment.",
    )
    makers = (table_1, figure_1, table_2, table_3, table_4, figure_5, article)
    sections = [_about(measured), *(section for maker in makers for section in maker(measured))]
    return Page("Speculative decoding: measured", lead, sections, "outrider bench report")


def _about(measured: Sequence[Measurement]) -> Section:
    """Where the figures come from."""
    columns = ["bench", "what", "log", "prompts", "tokens", "runs", *_MACHINE]
    rows = [_origin(one) for one in measured]
    gaps = missing(measured)
    text = [f"Not measured: {kind}. It is measured by: {command}" for kind, command in gaps.items()]
    return Section(
        "measured-on", "What was measured, and on what", text=text, table=DataTable(columns, rows, frozenset({3, 4, 5}))
    )


def _origin(one: Measurement) -> list[str]:
    given = {**one.settings, **(one.found or {})}
    tokens = given.get("max_new_tokens", given.get("total_tokens", ""))
    machine = given.get("machine", ["", "", ""])  # of a log that has no figures yet
    known = dict(zip(("processor", "threads", "device"), machine, strict=True)) | given
    state = "" if one.found else " (not ended)"
    about = [str(known.get(name, "")) for name in _MACHINE]
    runs = str(len(one.runs)) if one.runs else ""
    return [one.kind + state, one.label, one.path.name, str(given.get("prompts", "")), str(tokens), runs, *about]
