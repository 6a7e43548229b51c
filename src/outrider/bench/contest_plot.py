"""The picture of a contest: a bar for each contender, with its quartiles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from outrider.bench.contest import Row
from outrider.errors import ParameterError, why_unread
from outrider.support.optional import optional

PANEL, CHARACTER = 4.2, 0.08  # inches
OWN, OTHERS = "#0072b2", "#999999"  # told apart without colour by the names, too


def plot_rates(rows: Sequence[Row], own: Collection[str], path: Path) -> None:
    """Tokens a second, a panel for each setting. own: the names of our contenders."""
    figure_class = optional("matplotlib.figure", "a plot").Figure
    settings = list(dict.fromkeys(row.setting for row in rows))
    names = list(dict.fromkeys(row.contender for row in rows))
    width = PANEL * len(settings) + CHARACTER * max(map(len, names))
    figure = figure_class(figsize=(width, 1.2 + 0.34 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(settings), squeeze=False, sharey=True)[0]
    for axis, setting in zip(axes, settings, strict=True):
        shown = {row.contender: row.rate for row in rows if row.setting == setting}
        for place, name in enumerate(reversed(names)):
            if name in shown:
                rate = shown[name]
                spread = [[rate.median - rate.low], [rate.high - rate.median]]
                axis.barh(place, rate.median, color=OWN if name in own else OTHERS, xerr=spread, ecolor="#333333", capsize=2)
        axis.set(title=setting, xlabel="tokens a second: median over prompts, quartiles")
    axes[0].set_yticks(range(len(names)), list(reversed(names)))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ParameterError(f"plot {path} can't be written ({why_unread(error)}): name a .svg or .png file") from None
