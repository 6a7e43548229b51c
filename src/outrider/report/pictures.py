"""The pictures of the documents: one round, why nothing is lost, and where the time goes. Drawn from `worked_example`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from outrider.report.plots import ink, to_svg
from outrider.report.worked_example import CONTEXT, DRAFT, TARGET, WORDS, Example, timeline, work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A picture and the numbers in it."""

    name: str
    title: str
    text: str
    inches: tuple[float, float]
    numbers: dict[str, Any]
    fill: Callable[[Figure], None]
    source: str = "worked_example.py, decided by verify"

    def svg(self) -> str:
        """As an `<svg>` element."""
        return to_svg(self.name, self.title, self.text, self.inches, self.fill)

    def to_dict(self) -> dict[str, Any]:
        """For machine-readable output."""
        return {"name": self.name, "title": self.title, "source": self.source, "text": self.text, "numbers": self.numbers}

    def rows(self) -> Iterator[tuple[str, str, str, float, float | None]]:
        """A picture has no curves."""
        return iter(())

    def digest(self) -> str:
        """As of `FigureData`."""
        return sha256(json.dumps([self.title, self.text, self.numbers]).encode()).hexdigest()[:16]


def pictures() -> dict[str, Picture]:
    """All of them, by name."""
    example = work()
    return {picture.name: picture for picture in (_round(example), _overlap(example), _timeline())}


def _round(example: Example) -> Picture:
    kept = [step.word for step in example.steps[: example.accepted]]

    def fill(figure: Figure) -> None:
        ax = _canvas(figure, 12.6, 4.7)
        for y, label in (
            (4.2, "1  draft proposes"),
            (3.1, "2  target scores all"),
            (2.1, "3  keep or reject"),
            (0.6, "text"),
        ):
            ax.text(0.0, y, label, va="center", ha="left", fontweight="bold")
        for i, step in enumerate(example.steps):
            x = 4.4 + 1.8 * i
            _box(ax, x, 4.2, step.word, "neutral" if step.outcome == "unused" else step.outcome)
            ax.text(x, 3.6, f"q = {step.draft:.2f}", ha="center", va="center", fontsize=8.5)
            ax.text(x, 3.1, f"p = {step.target:.2f}", ha="center", va="center", fontsize=8.5)
            ax.text(x, 2.1, _decision(step), ha="center", va="center", fontsize=8.5)
        ax.text(0.3, 3.6, "from its own q", va="center", fontsize=8.5)
        ax.text(0.3, 2.65, "in one pass, giving p", va="center", fontsize=8.5)
        ax.text(3.6, 0.6, f"{CONTEXT} …", va="center", ha="right", fontsize=8.5)
        for i, word in enumerate(kept):
            _box(ax, 4.4 + 1.8 * i, 0.6, word, "accepted")
        last = 4.4 + 1.8 * example.accepted
        _box(ax, last, 0.6, example.recovered, "recovered")
        ax.text(last + 1.0, 0.6, "recovered: drawn from what\nthe draft had too little of", va="center", fontsize=8.5)

    return Picture(
        "round",
        "One round",
        f"The draft proposes {len(example.steps)} tokens after “{CONTEXT}”. The target scores them in one pass. "
        f"{example.accepted} are accepted, the next is rejected and replaced by “{example.recovered}”; what was drafted "
        "after it is dropped.",
        (9.4, 3.3),
        {"steps": [asdict(step) for step in example.steps], "accepted": example.accepted, "recovered": example.recovered},
        fill,
    )


def _decision(step: Any) -> str:
    if step.outcome == "unused":
        return "not looked at"
    sign = "<" if step.outcome == "accepted" else "≥"
    return f"p/q = {step.target / step.draft:.2f}\nu = {step.uniform:.2f} {sign} {step.chance:.2f}\n{step.outcome}"


def _overlap(example: Example) -> Picture:
    p, q = TARGET[example.accepted], DRAFT[example.accepted]
    shown = [i for i in range(len(WORDS)) if p[i] or q[i]]

    def fill(figure: Figure) -> None:
        ax = figure.subplots()
        for place, i in enumerate(shown):
            both = min(p[i], q[i])
            edges: dict[str, Any] = {"edgecolor": ink("ink"), "linewidth": 0.8, "width": 0.36}
            ax.bar(place - 0.2, both, color=ink("accepted"), **edges)
            ax.bar(place + 0.2, both, color=ink("accepted"), **edges)
            if q[i] > both:
                ax.bar(place - 0.2, q[i] - both, bottom=both, color=ink("rejected"), hatch="//", **edges)
            if p[i] > both:
                ax.bar(place + 0.2, p[i] - both, bottom=both, color=ink("recovered"), hatch="\\\\", **edges)
            ax.text(place - 0.2, q[i] + 0.012, f"q {q[i]:.2f}", ha="center", fontsize=8.5)
            ax.text(place + 0.2, p[i] + 0.012, f"p {p[i]:.2f}", ha="center", fontsize=8.5)
        ax.set_xticks(range(len(shown)), [f"“{WORDS[i]}”" for i in shown])
        ax.grid(visible=False)
        ax.set_ylim(0, 0.66)
        ax.set_title("probability of the third token: left bar draft, right bar target", loc="left", fontsize=10)
        names = {
            "accepted": "drafted and kept, min(p, q)",
            "rejected": "drafted and rejected",
            "recovered": "recovered, p − q",
        }
        handles = [_patch(name) for name in names]
        ax.legend(handles, list(names.values()), loc="upper right")

    return Picture(
        "overlap",
        "Why nothing is lost",
        f"What draft and target share, {example.beta:.2f}, is drafted and kept. What the draft has too much of, "
        f"{1 - example.beta:.2f}, is rejected, and exactly as much is recovered where it has too little: each word ends up "
        "with its target probability.",
        (7.2, 3.6),
        {"words": [WORDS[i] for i in shown], "p": [p[i] for i in shown], "q": [q[i] for i in shown], "beta": example.beta},
        fill,
    )


def _patch(name: str) -> Any:
    from matplotlib.patches import Patch

    hatch = {"rejected": "//", "recovered": "\\\\"}.get(name)
    return Patch(facecolor=ink(name), edgecolor=ink("ink"), hatch=hatch, linewidth=0.8)


def _timeline() -> Picture:
    alpha, gamma, c, wanted = 0.8, 4, 0.15, 12
    rounds = timeline(alpha, gamma, wanted, seed=3)
    made = sum(rounds) + len(rounds)
    seconds = len(rounds) * (1 + gamma * c)

    def fill(figure: Figure) -> None:
        ax = _canvas(figure, made + 0.4, 3.6)
        ax.text(0, 3.35, f"plain: {made} tokens in {made} target steps", fontweight="bold", va="center")
        for i in range(made):
            _bar(ax, i, 2.75, 1.0, "bonus", "1")
        ax.text(
            0, 1.95, f"γ = {gamma}, c = {c}: {made} tokens in {seconds:.1f} target steps", fontweight="bold", va="center"
        )
        at = 0.0
        for accepted in rounds:
            for _ in range(gamma):
                _bar(ax, at, 1.35, c, "neutral", "")
                at += c
            _bar(ax, at, 1.35, 1.0, "accepted", f"{accepted} + 1")
            at += 1.0
        ax.annotate("", (made, 0.8), (0, 0.8), arrowprops={"arrowstyle": "->", "color": ink("ink")})
        ax.text(made, 0.4, "time", ha="right", va="center")
        ax.text(
            0,
            0.4,
            "narrow: a draft step; wide: a target step, with the tokens it yields, accepted + 1",
            va="center",
            fontsize=8.5,
        )

    return Picture(
        "timeline",
        "Where the time goes",
        f"Plain decoding needs a target step for every token. With drafts of {gamma}, each costing {c} of a target step, "
        f"the same {made} tokens take {len(rounds)} target steps and {gamma * len(rounds)} draft steps: the time of "
        f"{seconds:.1f} target steps instead of {made}. Simulated: each drafted token is accepted with probability {alpha}.",
        (8.8, 2.3),
        {"alpha": alpha, "gamma": gamma, "c": c, "rounds": rounds, "tokens": made, "seconds": seconds},
        fill,
        "worked_example.timeline; Leviathan Figure 5 is such a trace",
    )


def _canvas(figure: Figure, width: float, height: float) -> Axes:
    ax: Axes = figure.subplots()
    ax.set_xlim(0, width)
    ax.set_ylim(0, height)
    ax.axis("off")
    return ax


def _box(ax: Axes, x: float, y: float, word: str, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.4", "facecolor": ink(colour), "edgecolor": ink("ink"), "linewidth": 0.8}
    ax.text(x, y, word, ha="center", va="center", bbox=box)


def _bar(ax: Axes, x: float, y: float, width: float, colour: str, label: str) -> None:
    ax.broken_barh([(x, width)], (y - 0.3, 0.6), facecolor=ink(colour), edgecolor=ink("ink"), linewidth=0.8)
    ax.text(x + width / 2, y, label, ha="center", va="center", fontsize=8.5)
