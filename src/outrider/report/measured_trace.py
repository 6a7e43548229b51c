"""Leviathan et al. 2022, Figure 5: the calls of draft and target over time, from the rounds of a sweep's log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outrider.report.measured_logs import Measurement, not_measured
from outrider.report.page import DataTable, Section
from outrider.report.plots import ink, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS = 24
_SOURCE = "Leviathan et al. 2022, Figure 5"
_HEADING = "The calls over time"


def figure_5(measured: Sequence[Measurement]) -> list[Section]:
    """The first prompt of each sweep: plain, at its quickest K, and at the longest."""
    sections: list[Section] = []
    for one in measured:
        if one.kind == "sweep" and any(run.get("draft_seconds") for run in one.runs):
            chosen = _choose(one.runs)
            sections.append(_section(f"leviathan-figure-5-{len(sections) + 1}", one.label, chosen))
    if sections:
        return sections
    text = not_measured(measured, "sweep") or [
        "Not shown: the sweeps given are figures without a log, or logs of rounds whose parts were not kept; a new sweep "
        "keeps them."
    ]
    return [Section("leviathan-figure-5-1", _HEADING, _SOURCE, text)]


def _choose(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of one prompt at one setting, the last one asked for (sampled, where there is one)."""
    kept = [run for run in runs if run.get("draft_seconds")]
    setting = kept[-1]["setting"]
    group = {
        run["length"]: run for run in reversed(kept) if run["setting"] == setting and run["example"] == kept[0]["example"]
    }
    drafted = [length for length in group if length]
    if not drafted:
        return [group[length] for length in sorted(group)]
    quickest = min(drafted, key=lambda length: sum(r[3] for r in group[length]["rounds"]) / len(group[length]["tokens"]))
    return [group[length] for length in sorted({*([0] if 0 in group else []), quickest, max(drafted)})]


def calls(run: dict[str, Any]) -> list[tuple[float, float, int, int]]:
    """(ms of drafting, ms of the target's pass and the rest, tokens kept, tokens drafted) of each round, up to TOKENS."""
    found, tokens = [], 0
    for (kept, drafted, _, seconds, _), draft in zip(run["rounds"], run["draft_seconds"], strict=True):
        if tokens >= TOKENS:
            break
        found.append((1000 * draft, 1000 * (seconds - draft), int(kept), int(drafted)))
        tokens += int(kept)
    return found


def _section(name: str, label: str, runs: list[dict[str, Any]]) -> Section:
    rows = []
    for run in runs:
        made = calls(run)
        tokens, total = sum(kept for *_, kept, _ in made), sum(draft + rest for draft, rest, *_ in made)
        drafting = sum(draft for draft, *_ in made)
        rows.append(
            [str(run["length"]), str(tokens), str(len(made)), f"{total:.1f}", f"{drafting:.1f}", f"{total / tokens:.2f}"]
        )
    columns = ["K", "tokens", "passes of the target", "ms", "of it drafting", "ms/token"]
    table = DataTable(columns, rows, frozenset(range(len(columns))))
    text = [
        f"{label}; {runs[0]['setting']}; up to {TOKENS} tokens of {runs[0]['example']}. Each bar is a round: "
        "first the draft (grey), then the target's pass (green) with the number of tokens that it yields. The paper's "
        "figure is a diagram without numbers."
    ]
    words = "; ".join(f"K = {row[0]}: {row[1]} tokens in {row[2]} passes and {row[3]} ms" for row in rows)
    svg = to_svg(name, f"{_HEADING}: {label}", words, (10.4, 1.1 + 0.75 * len(runs)), _drawing(runs))
    return Section(name, _HEADING, _SOURCE, text, svg, table)


def _drawing(runs: list[dict[str, Any]]) -> Any:
    longest = max(sum(draft + rest for draft, rest, *_ in calls(run)) for run in runs)

    def fill(figure: Figure) -> None:
        ax = figure.subplots()
        for place, run in enumerate(runs):
            at = 0.0
            for draft, rest, kept, _ in calls(run):
                edge: dict[str, Any] = {"edgecolor": ink("ink"), "linewidth": 0.6}
                if draft > 0:
                    ax.broken_barh([(at, draft)], (place - 0.3, 0.6), facecolor=ink("neutral"), **edge)
                ax.broken_barh([(at + draft, rest)], (place - 0.3, 0.6), facecolor=ink("accepted"), **edge)
                if rest > longest / 60:
                    ax.text(at + draft + rest / 2, place, str(kept), ha="center", va="center", fontsize=7.5)
                at += draft + rest
        ax.set_yticks(range(len(runs)), ["plain" if not run["length"] else f"K = {run['length']}" for run in runs])
        ax.invert_yaxis()
        ax.grid(visible=False)
        ax.set_xlim(left=0)
        ax.set_xlabel("milliseconds")

    return fill
