"""Figures as SVG text, by matplotlib: the same bytes for the same numbers, readable on light and on dark paper.

matplotlib knows fixed colours only, so it draws with stand-ins, which are then replaced by CSS variables; the page, or the
style sheet inside a file of its own, gives these their values. Text stays text (`svg.fonttype: none`), ids are made unique
per figure, and no date or version is written.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from outrider.support.optional import optional
from outrider.theory.figure_data import Curve, FigureData, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name → (stand-in, on light paper, on dark paper). Contrast with the paper is 4.5:1 or more for what is text or a line.
COLOURS = {
    "paper": ("#0a0b01", "#ffffff", "#16191d"),
    "ink": ("#0a0b02", "#1f2328", "#e6e8eb"),
    "faint": ("#0a0b03", "#d5d9de", "#3a4149"),
    "series-0": ("#0a0b10", "#0b5cad", "#6cb6ff"),
    "series-1": ("#0a0b11", "#a14a00", "#f0a35e"),
    "series-2": ("#0a0b12", "#1a7340", "#6fd08c"),
    "series-3": ("#0a0b13", "#7a3aa8", "#cf9ff5"),
    "series-4": ("#0a0b14", "#b42318", "#ff9088"),
    "series-5": ("#0a0b15", "#4d5a66", "#aab6c2"),
    "series-6": ("#0a0b16", "#00666e", "#5fd0d8"),
    "accepted": ("#0a0b20", "#b7e4c4", "#1f5233"),
    "recovered": ("#0a0b21", "#ffe08a", "#66520b"),
    "bonus": ("#0a0b22", "#aee3ea", "#0d515a"),
    "rejected": ("#0a0b23", "#f7c6c1", "#6b221b"),
    "neutral": ("#0a0b24", "#e4e8ed", "#2f363e"),
}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)), (0, (3, 3)), (0, (9, 3)), (0, (1, 3)))
MARKERS = "os^Dv"
FEW = 10  # points: so few are marked
Bar = tuple[str, float, float, float, str]  # its label, the low end, the figure, the high end, its colour
_FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"


def ink(name: str) -> str:
    """The stand-in to draw with."""
    return COLOURS[name][0]


def style_sheet(selector: str) -> str:
    """CSS that gives the variables their values: light, dark where the reader prefers it, light on paper."""
    light, dark = ("".join(f"--{name}:{colour[at]};" for name, colour in COLOURS.items()) for at in (1, 2))
    return (
        f"{selector}{{color-scheme:light dark;{light}}}@media screen and (prefers-color-scheme:dark){{{selector}{{{dark}}}}}"
    )


def draw(data: FigureData) -> str:
    """The figure as an `<svg>` element for a page that has `style_sheet`."""

    def fill(figure: Figure) -> None:
        axes = figure.subplots(1, len(data.panels), squeeze=False)[0]
        for ax, panel in zip(axes, data.panels, strict=True):
            _panel(ax, panel)
        if len({_labels(panel) for panel in data.panels}) == 1 and len(data.panels) > 1:
            figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
            return
        for ax, panel in zip(axes, data.panels, strict=True):
            if len(panel.curves) > 1:
                longest = max(map(len, _labels(panel)))
                ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3 if longest < 12 else 1)

    width = {1: 5.6, 2: 8.6}.get(len(data.panels), 10.4)
    return to_svg(data.name, data.title, data.text, (width, 4.2), fill)


def draw_bars(name: str, title: str, text: str, x_label: str, bars: Sequence[Bar], most: float | None = None) -> str:
    """Figures with their intervals below each other, on an axis from 0 to `most`; nothing without any."""
    if not bars:
        return ""

    def fill(figure: Figure) -> None:
        ax = figure.subplots()
        for place, (_, low, value, high, colour) in enumerate(bars):
            ax.errorbar([value], [place], xerr=[[value - low], [high - value]], fmt="o", color=ink(colour), capsize=3)
        ax.set_yticks(range(len(bars)), [label for label, *_ in bars])
        ax.invert_yaxis()
        ax.set_xlim(0, most)
        ax.set_xlabel(x_label)

    return to_svg(name, title, text, (8.6, 1.2 + 0.32 * len(bars)), fill)


def to_svg(name: str, title: str, text: str, inches: tuple[float, float], fill: Callable[[Figure], None]) -> str:
    """Whatever `fill` draws, as an `<svg>` element. title and text: for those who cannot see it."""
    matplotlib = matplotlib_or_error()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": name}):
        figure = Figure(figsize=inches, layout="constrained")
        fill(figure)
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return _clean(out.getvalue(), name, title, text)


def standalone(svg: str, digest: str = "") -> str:
    """A file of its own: with a style sheet, paper behind it, and the fingerprint of its data."""
    head, rest = svg.split(">", 1)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)[0]
    style = f"<style>{style_sheet('svg')}</style>"
    paper = f'<rect width="{width}" height="{height}" style="fill: var(--paper)"/>'
    mark = f' data-digest="{digest}"' if digest else ""
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head} width="{width}" height="{height}"{mark}>{style}{paper}{rest}\n'


_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # whose metrics are known; replaced by the reader's own afterwards
    "font.size": 9.5,
    "text.color": ink("ink"),
    "axes.labelcolor": ink("ink"),
    "axes.edgecolor": ink("ink"),
    "xtick.color": ink("ink"),
    "ytick.color": ink("ink"),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": ink("faint"),
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.6,
}


def _panel(ax: Axes, panel: Panel) -> None:
    lines = [curve for curve in panel.curves if curve.style == "line"]
    points = [curve for curve in panel.curves if curve.style == "points"]
    if panel.reference is not None:
        ax.axhline(panel.reference, color=ink("ink"), lw=0.8)
    for i, curve in enumerate(lines):
        style: dict[str, Any] = {"color": _series(i), "linestyle": DASHES[i % len(DASHES)], "lw": 1.7}
        style["drawstyle"] = "steps-mid" if panel.steps else "default"
        if len(curve.x) <= FEW:
            style |= {"marker": ".", "ms": 4}
        ax.plot(curve.x, _numbers(curve), label=curve.label, **style)
    for i, curve in enumerate(points):
        ax.plot(curve.x, _numbers(curve), MARKERS[i], label=curve.label, color=_series(i), ms=5, mfc="none", mew=1.5)
    ax.set_xlabel(panel.x_label)
    ax.set_title(panel.y_label, fontsize=10, loc="left", color=ink("ink"))
    ax.set_axisbelow(True)


def _labels(panel: Panel) -> tuple[str, ...]:
    return tuple(curve.label for curve in panel.curves)


def _series(number: int) -> str:
    return ink(f"series-{number % 7}")


def _numbers(curve: Curve) -> list[float]:
    return [float("nan") if value is None else value for value in curve.y]


def _clean(svg: str, name: str, title: str, text: str) -> str:
    """Colours to variables, ids to the figure's own, no prolog; with a title and a description."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<!--.*?-->", "", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")
    svg = re.sub(r'="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)  # 1/100 of a point is enough
    for variable, (stand_in, _, _) in COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{variable})")
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", lambda match: f"font: {match[1]} {_FONT}", svg)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("*{stroke-linejoin", f"#{name} *{{stroke-linejoin")
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" ', r"<svg \1", svg, count=1)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*" ', r"<svg \1", svg, count=1)
    width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', svg)[0]) * 4 / 3  # points to pixels
    about = f'id="{name}" role="img" aria-labelledby="{name}-title {name}-desc" style="max-width: {width:.0f}px"'
    head, rest = svg.split(">", 1)
    words = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(text)}</desc>'
    return f"{head} {about}>{words}{rest}"


def matplotlib_or_error() -> Any:
    """The library. Raises `MissingPackageError` where it is not installed."""
    return optional("matplotlib", "a figure")
