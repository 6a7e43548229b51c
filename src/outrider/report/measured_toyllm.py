"""The toyllm article's experiment, measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.report.measured_logs import Measurement, finished, not_measured, quartiles
from outrider.report.page import DataTable, Section

_SOURCE = "ai-glimpse, LLM Speculative Sampling, 2025"
_HEADING = "toyllm's run"


def article(measured: Sequence[Measurement]) -> list[Section]:
    """Its figures beside ours, a section for each log."""
    sections = [_section(f"toyllm-{i}", one.label, found) for i, (one, found) in enumerate(finished(measured, "toyllm"), 1)]
    if sections:
        return sections
    from dataclasses import asdict

    from outrider.bench.toyllm import Article

    rows = [[name, theirs] for name, theirs, _ in _lines(asdict(Article()), None)]
    table = DataTable(["", "toyllm"], rows, frozenset({1}))
    return [Section("toyllm-1", _HEADING, _SOURCE, not_measured(measured, "toyllm"), table=table)]


def _section(name: str, label: str, found: dict[str, Any]) -> Section:
    ours = found["ours"]
    text = [
        f"{label}; K = {found['num_draft_tokens']}, {found['total_tokens']} tokens in all, greedy, "
        f"{found.get('repetitions', 'several')} repetitions; medians, reading the prompt included. The article: GPT-2 XL "
        "with GPT-2, K = 4, 266 tokens. Its prediction is r′(K + 1) · t_target / (K · t_draft + t_target)."
    ]
    if ours["divergence"] is not None:
        at = ours["divergence"]
        text.append(
            f"The two texts differ from token {at['position']} on; the logits there are {at['gap']:.3g} apart, the engine's "
            f"rounding is {at['rounding']:.3g}."
        )
    rows = [list(line) for line in _lines(found["article"], ours)]
    return Section(name, _HEADING, _SOURCE, text, table=DataTable(["", "toyllm", "here"], rows, frozenset({1, 2})))


def _lines(theirs: dict[str, Any], ours: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """(what, the article's, ours)"""

    def both(what: str, name: str, form: str, here: str | None = None) -> tuple[str, str, str]:
        return what, form.format(theirs[name]), "" if ours is None else form.format(ours[here or name])

    lines = [
        both("plain, seconds", "plain_seconds", "{:.2f}"),
        both("speculative, seconds", "speculative_seconds", "{:.2f}"),
        ("speed-up (quartiles)", f"{theirs['speedup']:.2f}×", "" if ours is None else quartiles(ours["speedup"])),
        both("predicted by its formula", "predicted", "{:.2f}×", "predicted_article"),
        both("target, ms a token", "target_ms", "{:.1f}"),
        both("draft, ms a token", "draft_ms", "{:.1f}"),
        both("r′ = tokens per round / (K + 1)", "efficiency", "{:.4f}"),
    ]
    ratio = theirs["predicted"] / theirs["speedup"]
    here = "" if ours is None else f"{ours['predicted_article'] / ours['speedup']['median']:.2f}"
    lines.append(("predicted / measured", f"{ratio:.2f}", here))
    if ours is not None:
        rate, closed = ours["acceptance_rate"], ours["predicted_closed"]
        lines.append(("predicted by the measured costs", "", f"{ours['predicted_costs']:.2f}×"))
        lines.append(("predicted by α and c (Theorem 3.8)", "", "—" if closed is None else f"{closed:.2f}×"))
        lines.append(("α = accepted / tested", "", "—" if rate is None else f"{rate:.3f}"))
        lines.append(("texts of both sides", "identical", "identical" if ours["identical"] else "differ"))
    return lines
