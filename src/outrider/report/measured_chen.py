"""Chen et al. 2023, Table 1 and Figure 1, measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
from outrider.report.plots import DASHES, Bar, draw_bars, ink, to_svg
from outrider.theory.chinchilla import REMARKS, redrawn
from outrider.theory.printed import CHEN_1

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOMAINS = ("HumanEval", "XSum")


def table_1(measured: Sequence[Measurement]) -> list[Section]:
    """Quality, time per token and speed-up of the tasks."""
    columns = ["where", "task", "sampling", "draft", "metric", "quality (95 %)", "ms/token", "speed-up (quartiles)"]
    columns += [
        "quality less plain's (95 %)",
        "ms/token, quartiles",
        "α",
        "tokens/round",
        "prompts",
        "greedy texts of plain",
    ]
    rows = [_task_row(found, row) for _, found in finished(measured, "tasks") for row in found["rows"]]
    ours = len(rows)
    for task, sampling, metric, plain, quick, slow_ms, ms, speedup in CHEN_1:
        given = ["Chinchilla 70B", task, sampling]
        rows.append([*given, "plain", metric, plain, slow_ms, "1", "", "", "", "", "", ""])
        rows.append([*given, "4B, K = 4", metric, quick, ms, speedup, "", "", "", "", "", ""])
    text = [
        *not_measured(measured, "tasks"),
        "Quality is to be the same with and without a draft, since the distribution is: what differs is "
        "chance, and its interval "
        "should hold 0. Chen: 11,305 summaries of 128 tokens at most, 16,400 programs of 512.",
    ]
    table = DataTable(columns, rows, frozenset({6, 10, 11, 12}), frozenset(range(ours, len(rows))))
    drawn = _paces([row for _, found in finished(measured, "tasks") for row in found["rows"]])
    return [Section("chen-table-1", "Quality and speed by task", "Chen et al. 2023, Table 1", text, drawn, table)]


def _task_row(found: dict[str, Any], row: dict[str, Any]) -> list[str]:
    metric = "" if row["quality"] is None else str(found.get("metric") or "")
    spread = row["ms_spread"]
    paces = f"{spread['low']:.2f} – {spread['high']:.2f}"
    speedup = "1" if row["speedup"] is None else quartiles(row["speedup"])
    quality = [metric, interval(row["quality"]), number(row["ms_per_token"]), speedup]
    pace = [interval(row["against_plain"]), paces, number(row["acceptance_rate"]), number(row["tokens_per_round"])]
    last = [str(row["prompts"]), agreement(row, row["prompts"])]
    return [model(found), str(found["task"]), row["setting"], short(row["drafting"]), *quality, *pace, *last]


def _paces(rows: list[dict[str, Any]]) -> str:
    """Milliseconds a token of every way of drafting, median and quartiles over prompts."""
    bars: list[Bar] = []
    for row in rows:
        label, spread = f"{row['setting']}: {short(row['drafting'])}", row["ms_spread"]
        colour = "series-5" if row["speedup"] is None else "series-0"
        bars.append((label, spread["low"], spread["median"], spread["high"], colour))
    words = "; ".join(f"{row['setting']}, {short(row['drafting'])}: {row['ms_spread']['median']:.1f} ms" for row in rows)
    x_label = "milliseconds a token: median and quartiles over prompts"
    return draw_bars("chen-1-paces", "Milliseconds a token", words, x_label, bars)


def figure_1(measured: Sequence[Measurement]) -> list[Section]:
    """Time, acceptance and the length of a round against K, a section for each sweep and setting."""
    source = "Chen et al. 2023, Figure 1"
    sections: list[Section] = []
    for one, found in finished(measured, "sweep"):
        for sweep in found["sweeps"]:
            name = f"chen-figure-1-{len(sections) + 1}"
            sections.append(_sweep_section(name, one.label, found, sweep, source))
    if sections:
        return sections
    text = [*not_measured(measured, "sweep"), f"{REMARKS}."]
    return [Section("chen-figure-1-1", "Time, acceptance and round against K", source, text, table=_redrawn())]


def _redrawn() -> DataTable:
    """Chen's curves alone, as far as the text states what they follow from."""
    columns = ["K", *(f"{domain}: {what}" for domain in _DOMAINS for what in ("of K = 0", "/(K + 1)")), "round ms"]
    rows = []
    for length in range(8):
        points = [redrawn(domain, length) for domain in _DOMAINS]
        values = [number(value) for point in points for value in (point.relative_time, point.efficiency)]
        rows.append([str(length), *values, number(points[0].loop_ms, 1)])
    return DataTable(columns, rows, frozenset(range(len(columns))), frozenset(range(len(rows))))


def _sweep_section(name: str, label: str, found: dict[str, Any], sweep: dict[str, Any], source: str) -> Section:
    rows = sweep["rows"]
    base = rows[0]["ms_per_token"]
    best = min(rows, key=lambda row: row["ms_per_token"])
    words = f"Quickest here: K = {best['length']}, {best['ms_per_token'] / base:.2f} of plain decoding's time"
    text = [
        f"{label}; {sweep['setting']}; {rows[0]['prompts']} prompts × {found['max_new_tokens']} tokens. {words}.",
        f"{REMARKS}. “Acceptance rate” in Chen's middle panel is tokens per round / (K + 1); α is accepted / tested.",
    ]
    if sweep["slope_ms"] is not None:
        error = sweep.get("slope_error_ms")  # older files have none
        within = "" if error is None else f" ± {error:.2f}"
        text.append(
            f"A further drafted token adds {sweep['slope_ms']:.2f}{within} ms to a round; drafting it costs "
            f"{sweep['step_ms']:.2f} ms by the tables. Chen: the gradient is slightly higher than the sampling speed of the "
            "draft (1.8 ms)."
        )
    svg = to_svg(name, f"Against K: {label}", f"{label}, {sweep['setting']}. {words}.", (10.4, 4.4), _drawing(rows))
    heading = f"Time, acceptance and round against K: {sweep['setting']}"
    percentiles = DataTable(_PERCENTILES, [_percentiles(row) for row in rows], frozenset(range(len(_PERCENTILES))))
    folded = [
        ("Percentiles: milliseconds of rounds and of tokens, each token given an equal part of its round", percentiles)
    ]
    table = DataTable(_COLUMNS, [_sweep_row(row, base) for row in rows], frozenset({0, 1, 2, *range(4, 13)}))
    return Section(name, heading, source, text, svg, table, folded)


_COLUMNS = ["K", "ms/token ± sd", "of K = 0", "speed-up (quartiles)", "α", "tokens/round", "/(K + 1)", "round ms"]
_COLUMNS += ["predicted", "predicted/measured", "Chen HumanEval: of K = 0", "XSum: of K = 0", "their round ms"]
_COLUMNS += ["greedy texts of plain"]
_PERCENTILES = ["K", "tokens", "round mean", "P50", "P90", "P99", "token mean", "token P50", "token P90", "token P99"]


def _sweep_row(row: dict[str, Any], base: float) -> list[str]:
    chen = [redrawn(domain, row["length"]) for domain in _DOMAINS]
    made = row["predicted"]
    pace = f"{row['ms_per_token']:.2f} ± {row['ms_deviation']:.2f}"
    return [
        str(row["length"]),
        pace,
        number(row["ms_per_token"] / base),
        quartiles(row["speedup"]),
        number(row["acceptance_rate"]),
        number(row["tokens_per_round"]),
        number(row["efficiency"]),
        number(row["loop"]["mean"]),
        number(made["loop_ms"]),
        number(made["loop_ms"] / row["loop"]["mean"]),
        *(number(point.relative_time) for point in chen),
        number(chen[0].loop_ms, 1),
        agreement(row, row["prompts"]),
    ]


def _percentiles(row: dict[str, Any]) -> list[str]:
    parts = [(row[part], name) for part in ("loop", "token") for name in ("mean", "p50", "p90", "p99")]
    return [str(row["length"]), str(row["tokens"]), *(number(part[name]) for part, name in parts)]


def _drawing(rows: list[dict[str, Any]]) -> Any:
    lengths = [row["length"] for row in rows]
    base = rows[0]["ms_per_token"]

    def fill(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3)
        paces, spread = ([row[name] / base for row in rows] for name in ("ms_per_token", "ms_deviation"))
        left.errorbar(lengths, paces, yerr=spread, fmt="o", color=ink("series-0"), capsize=3, label="measured, ± sd")
        _line(left, lengths, [row["predicted"]["ms_per_token"] / base for row in rows], 1, "predicted by the costs")
        closed = [1 / row["predicted"]["closed_form"] for row in rows]
        _line(left, lengths, closed, 2, "Theorem 3.8, α and c")
        for at, domain in enumerate(_DOMAINS):
            _line(left, lengths, [redrawn(domain, k).relative_time for k in lengths], 3 + at, f"Chen {domain}, redrawn")
            _line(middle, lengths, [redrawn(domain, k).efficiency for k in lengths], 3 + at, f"Chen {domain}, redrawn")
        middle.plot(lengths, [row["efficiency"] for row in rows], "o", color=ink("series-0"), label="measured")
        right.plot(lengths, [row["loop"]["mean"] for row in rows], "o", color=ink("series-0"), label="mean")
        _line(right, lengths, [row["predicted"]["loop_ms"] for row in rows], 1, "predicted by the costs")
        for at, name in enumerate(("p50", "p90", "p99")):
            _line(right, lengths, [row["loop"][name] for row in rows], 4 + at, name.upper())
        titles = (
            "time of a text, K = 0 is 1",
            "tokens per round / (K + 1)",
            "milliseconds of a round",
        )
        for ax, title in zip((left, middle, right), titles, strict=True):
            ax.set_title(title, fontsize=10, loc="left", color=ink("ink"))
            ax.set_xlabel("K, drafted tokens a round")
            ax.set_xticks(lengths)
            ax.set_ylim(bottom=0)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=1)

    return fill


def _line(ax: Axes, x: Sequence[float], y: Sequence[float], series: int, label: str) -> None:
    dashes = DASHES[series % len(DASHES)]
    ax.plot(x, y, color=ink(f"series-{series}"), linestyle=dashes, lw=1.6, marker=".", ms=4, label=label)
