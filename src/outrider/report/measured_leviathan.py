"""Leviathan et al. 2022, Tables 2 to 4, measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.report.measured_logs import (
    Measurement,
    agreement,
    finished,
    interval,
    model,
    not_measured,
    number,
    quartiles,
    short,
)
from outrider.report.page import DataTable, Section
from outrider.report.plots import draw, draw_bars
from outrider.theory.figure_data import Curve, FigureData, Panel
from outrider.theory.printed import LEVIATHAN_3, T5, Row, tables


def _printed() -> tuple[Row, ...]:
    """Tables 2 and 4 of the paper: given α, γ and c, the speed-up expected and measured."""
    return tables(["leviathan-4"])[0].rows


def _setting(temperature: str) -> str:
    return "greedy" if temperature == "0" else f"temperature {temperature}, top-p 1"


def table_2(measured: Sequence[Measurement]) -> list[Section]:
    """The speed-up of each draft at temperature 0 and 1."""
    columns = ["target", "task", "draft", "sampling", "α", "tokens/round", "speed-up (quartiles)", "prompts"]
    rows = []
    for _, found in finished(measured, "tasks"):
        for row in found["rows"]:
            if row["speedup"] is not None:
                given = [model(found), str(found["task"]), short(row["drafting"]), row["setting"]]
                rates = [number(row["acceptance_rate"]), number(row["tokens_per_round"]), quartiles(row["speedup"])]
                rows.append([*given, *rates, str(row["prompts"])])
    ours = len(rows)
    for printed in _printed():
        at = printed.given
        draft = f"{at['draft']}, K = {at['γ']}"
        rows.append([T5, at["task"], draft, _setting(at["temperature"]), at["α"], "", f"{printed.measured}×", ""])
    text = [*not_measured(measured, "tasks"), "Theirs: batches of one on a TPU-v4; translation and summaries."]
    table = DataTable(columns, rows, frozenset({4, 5, 7}), frozenset(range(ours, len(rows))))
    return [Section("leviathan-table-2", "Speed-up by draft", "Leviathan et al. 2022, Table 2", text, table=table)]


def table_3(measured: Sequence[Measurement]) -> list[Section]:
    """Alpha of each draft, position by position."""
    columns = ["target", "task", "draft", "sampling", "α (95 %)", "sd of β", "positions with a proposal", "tokens", "texts"]
    found_rows = [(found, row) for _, found in finished(measured, "alpha") for row in found["rows"]]
    rows = []
    for found, row in found_rows:
        given = [model(found), str(found["task"]), short(row["draft"]), row["setting"]]
        figures = [interval(row["alpha"]), number(row["deviation"]), f"{row['offered']:.0%}"]
        rows.append([*given, *figures, str(row["tokens"]), str(row["texts"])])
    ours = len(rows)
    rows += [[*given, alpha, "", "", "10,000", ""] for *given, alpha in printed_alphas()]
    text = [
        *not_measured(measured, "alpha"),
        "α is the mean over positions of β = Σ min(target, draft), from both distributions on texts of the "
        "target: no token is drawn "
        "to be tested (Corollary 3.6). Leviathan, Section 4.2: drafts two orders of magnitude smaller give 0.5 to 0.9, the "
        "sharper the distribution the higher; unigrams and bigrams give something, too.",
    ]
    table = DataTable(columns, rows, frozenset({5, 6, 7, 8}), frozenset(range(ours, len(rows))))
    drawn = _alphas([row for _, row in found_rows])
    return [Section("leviathan-table-3", "α by draft and sampling", "Leviathan et al. 2022, Table 3", text, drawn, table)]


def printed_alphas() -> Iterator[list[str]]:
    """Their Table 3. → target, task, draft, sampling, α"""
    for (target, task), drafts in LEVIATHAN_3.items():
        for entry in drafts.split(" / "):
            draft, *alphas = entry.split()
            yield from ([target, task, draft, _setting(at), alpha] for at, alpha in zip("01", alphas, strict=True))


def _alphas(rows: list[dict[str, Any]]) -> str:
    alphas = [(f"{short(row['draft'])}, {row['setting']}", row["alpha"]) for row in rows]
    bars = [(label, alpha["low"], alpha["value"], alpha["high"], "series-0") for label, alpha in alphas]
    words = "; ".join(f"{label}: {alpha['value']:.2f}" for label, alpha in alphas)
    x_label = "α, with its 95 % interval over texts"
    return draw_bars("leviathan-3-alpha", "α by draft and sampling", words, x_label, bars, 1)


def table_4(measured: Sequence[Measurement]) -> list[Section]:
    """Predicted beside measured."""
    columns = ["target", "task", "draft", "sampling", "K", "α", "c", "measured (quartiles)"]
    columns += ["Theorem 3.8", "its ratio", "by the costs", "its ratio", "greedy texts of plain"]
    rows: list[list[str]] = []
    points: dict[str, list[tuple[float, float]]] = {"here, Theorem 3.8": [], "here, by the costs": [], "T5 (paper)": []}
    for _, found in finished(measured, "sweep"):
        for sweep in found["sweeps"]:
            for row in (row for row in sweep["rows"] if row["length"]):
                rows.append(_prediction(found, sweep, row))
                median = row["speedup"]["median"]
                points["here, Theorem 3.8"].append((row["predicted"]["closed_form"], median))
                points["here, by the costs"].append((row["predicted"]["speedup"], median))
    ours = len(rows)
    for printed in _printed():
        at, took = printed.given, float(printed.measured or "nan")
        given = [T5, at["task"], at["draft"], _setting(at["temperature"]), at["γ"], at["α"], at["c"]]
        rows.append([*given, f"{took}×", f"{printed.theirs}×", number(float(printed.theirs) / took), "", "", ""])
        points["T5 (paper)"].append((float(printed.theirs), took))
    text = [
        *not_measured(measured, "sweep"),
        "Ratios are predicted / measured. Theorem 3.8 knows α and c only: it is off where scoring K + 1 tokens costs more "
        "than scoring one, and where acceptances are not independent. By the costs: the recorded rounds by the measured "
        "cost table, off where the table does not describe the run. In the figure, points on the line were predicted.",
    ]
    numeric = frozenset({4, 5, 6, 8, 9, 10, 11})
    table = DataTable(columns, rows, numeric, frozenset(range(ours, len(rows))))
    drawn = _scatter({label: pairs for label, pairs in points.items() if pairs})
    heading, source = "Speed-up predicted and measured", "Leviathan et al. 2022, Table 4"
    return [Section("leviathan-table-4", heading, source, text, drawn, table)]


def _prediction(found: dict[str, Any], sweep: dict[str, Any], row: dict[str, Any]) -> list[str]:
    made, took = row["predicted"], row["speedup"]["median"]
    given = [model(found), str(found["task"]), short(", ".join(found["draft"])), sweep["setting"]]
    known = [str(row["length"]), number(sweep["alpha"], 3), number(sweep["c"], 3)]
    closed = [f"{made['closed_form']:.2f}×", number(made["closed_form"] / took)]
    by_costs = [f"{made['speedup']:.2f}×", number(made["speedup"] / took)]
    return [*given, *known, quartiles(row["speedup"]), *closed, *by_costs, agreement(row, row["prompts"])]


def _scatter(points: dict[str, list[tuple[float, float]]]) -> str:
    most = max(value for pairs in points.values() for pair in pairs for value in pair)
    line = Curve("measured = predicted", (0.0, most), (0.0, most))
    curves = [
        Curve(name, tuple(x for x, _ in pairs), tuple(y for _, y in pairs), "points") for name, pairs in points.items()
    ]
    panel = Panel("predicted speed-up", "measured speed-up", (line, *curves))
    words = "Measured over predicted speed-ups: " + ", ".join(
        f"{len(pairs)} points {name}" for name, pairs in points.items()
    )
    return draw(FigureData("leviathan-4-scatter", "Predicted and measured", "", words, (panel,)))
