"""The time line of a run (Leviathan Figure 5): calls of draft and target over time, plain decoding below, on one axis.

Time is cut into windows of one length, one line of the page each, so that a thousand rounds stay readable and all have one
scale. The records hold the seconds of each phase, not their order within a round: it is drawn as draft, verify,
sampling, other. Plain decoding was not run: its calls are what the cost table says (`plain_seconds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, log10

from outrider.costs import Costs
from outrider.draft_length.predicted import plain_steps
from outrider.records import Round, seconds_by_phase

WIDTH = 960.0  # of a line, in SVG units
TOTALS = 1000.0  # of the longer bar of totals
STACK, SIDE = 84.0, 5.0  # at most: height of a round's tokens, side of one of them
TALL, GAP, PLAIN, AXIS = 22.0, 8.0, 13.0, 20.0
HEIGHTS = {"draft": 14.0, "verify": TALL, "sampling": 9.0, "other": 4.0}
ROUNDS_A_LINE, TOKENS_A_LINE = 40, 64
MOST_LINES = 400


@dataclass(frozen=True)
class Rect:
    """In SVG units."""

    x: float
    y: float
    width: float
    height: float
    kind: str


@dataclass(frozen=True)
class RoundShape:
    """What of a round falls into a line. stack: its tokens, at the line where the round ends."""

    number: int
    calls: tuple[Rect, ...]
    steps: str
    stack: tuple[Rect, ...]


@dataclass(frozen=True)
class Line:
    """One window of time. tokens, plain_tokens: produced by its end; plain: a path of the calls, None where there are none.

    top: where the target's calls begin; a line on which only plain decoding still runs needs no room above.
    """

    start: float
    rounds: tuple[RoundShape, ...]
    plain: str | None
    ticks: tuple[tuple[float, str], ...]
    tokens: int
    plain_tokens: int | None
    running: bool
    top: float

    @property
    def plain_top(self) -> float:
        return self.top + (TALL + GAP if self.running else 0.0)

    @property
    def axis(self) -> float:
        return self.plain_top + (PLAIN + 3.0 if self.plain is not None else 0.0)

    @property
    def height(self) -> float:
        return self.axis + AXIS


@dataclass(frozen=True)
class Part:
    """A stretch of a bar that shows totals."""

    x: float
    width: float
    kind: str
    label: str


@dataclass(frozen=True)
class Total:
    """A bar of totals: what it is of, its parts, what to write beside it."""

    name: str
    parts: tuple[Part, ...]
    label: str


@dataclass(frozen=True)
class Timeline:
    """seconds: of the run, by phase; plain_seconds: of plain decoding by the table, None without one. window: of a line."""

    lines: tuple[Line, ...]
    seconds: dict[str, float]
    plain_seconds: float | None
    window: float
    tokens: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def totals(self) -> list[Total]:
        """The whole run beside plain decoding of the same tokens, to one scale."""
        longest = max(self.total, self.plain_seconds or 0.0)
        parts, x = [], 0.0
        for phase, seconds in self.seconds.items():
            width = TOTALS * seconds / longest
            share = f"{phase}: {1000 * seconds:,.1f} ms, {100 * seconds / self.total:.1f} %"
            parts.append(Part(x, width, phase, share))
            x += width
        bars = [Total("this run", tuple(parts), f"{1000 * self.total:,.0f} ms for {self.tokens:,} tokens")]
        if self.plain_seconds is not None:
            width, label = TOTALS * self.plain_seconds / longest, f"{1000 * self.plain_seconds:,.0f} ms by the cost table"
            bars.append(Total("plain decoding", (Part(0.0, width, "plain", f"plain decoding: {label}"),), label))
        return bars


@dataclass
class _Scale:
    """From seconds to lines. side: of a token, such that the tallest stack of the run fits; top: room for that stack."""

    window: float
    side: float
    top: float
    ticks: float
    pieces: dict[int, list[RoundShape]] = field(default_factory=dict)

    def split(self, start: float, seconds: float) -> Iterator[tuple[int, float, float]]:
        """(line, x, width) of each piece of a stretch of time."""
        line = int(start // self.window)
        while seconds > 0:
            part = min(seconds, max(0.0, (line + 1) * self.window - start))
            if part > 0:
                yield line, self.x(line, start), WIDTH * part / self.window
            start, seconds, line = start + part, seconds - part, line + 1

    def x(self, line: int, at: float) -> float:
        return WIDTH * (at - line * self.window) / self.window


def make_timeline(rounds: Sequence[Round], prompt_tokens: int, costs: Costs | None) -> Timeline | None:
    """The time line of one sequence's rounds; None where the records hold no time."""
    seconds = seconds_by_phase(rounds, HEIGHTS)
    total = sum(seconds.values())
    if total <= 0:
        return None
    steps = [] if costs is None else plain_steps(rounds, costs, prompt_tokens)
    plain = None if costs is None else sum(seconds for _, seconds in steps)
    scale = _scale(rounds, total, plain)
    ends = _place(rounds, scale)
    plain_lines = _place_plain(steps, scale)
    count = ceil(max(total, plain or 0.0) / scale.window - 1e-9)
    lines = []
    for i in range(count):
        end = (i + 1) * scale.window
        produced = sum(number for at, number in ends if at <= end + 1e-9)
        behind = _produced(steps, end) if costs is not None else None
        path = plain_lines.get(i)
        shapes = tuple(scale.pieces.get(i, ()))
        running = i * scale.window < total
        top = scale.top if running else 0.0
        lines.append(Line(i * scale.window, shapes, path, _ticks(i, scale), produced, behind, running, top))
    return Timeline(tuple(lines), seconds, plain, scale.window, sum(len(r.tokens) for r in rounds))


def _scale(rounds: Sequence[Round], total: float, plain: float | None) -> _Scale:
    tokens = sum(len(r.tokens) for r in rounds)
    longest = max(total, plain or 0.0)
    window = min(longest, ROUNDS_A_LINE * total / len(rounds), TOKENS_A_LINE * (plain or total) / tokens)
    window = max(window, longest / MOST_LINES)
    decade = 10.0 ** (ceil(log10(window)) - 2)
    step = next(n * decade for n in (1, 2, 5, 10) if window <= 10 * n * decade)
    window = step * ceil(window / step - 1e-9)
    tallest = max(r.drafted + 1 for r in rounds)
    side = min(SIDE, STACK / tallest)
    return _Scale(window, side, side * tallest + 10, step)


def _place(rounds: Sequence[Round], scale: _Scale) -> list[tuple[float, int]]:
    """Put every round on its lines. → (end, tokens) of each"""
    at, ends = 0.0, []
    for number, record in enumerate(rounds, 1):
        calls: dict[int, list[Rect]] = {}
        steps: dict[int, str] = {}
        for phase, height in HEIGHTS.items():
            taken = record.seconds.get(phase, 0.0)
            for line, x, width in scale.split(at, taken):
                calls.setdefault(line, []).append(Rect(x, TALL - height, width, height, phase))
            if phase == "draft":
                steps = _steps(at, taken, record.drafted, scale)
            at += taken
        ends.append((at, len(record.tokens)))
        last = max(calls, default=max(0, ceil(at / scale.window) - 1))
        for line in sorted({*calls, last}):
            stack = _stack(record, scale.x(last, at), scale.side) if line == last else ()
            shape = RoundShape(number, tuple(calls.get(line, ())), steps.get(line, ""), stack)
            scale.pieces.setdefault(line, []).append(shape)
    return ends


def _steps(start: float, seconds: float, drafted: int, scale: _Scale) -> dict[int, str]:
    """Strokes between the tokens of a draft, equally far apart, where there is room for them. → a path by line"""
    if drafted < 2 or WIDTH * seconds / scale.window < 1.8 * drafted:
        return {}
    strokes: dict[int, str] = {}
    for i in range(1, drafted):
        at = start + seconds * i / drafted
        line = int(at // scale.window)
        stroke = f"M{scale.x(line, at):.2f} {TALL - HEIGHTS['draft']:g}v{HEIGHTS['draft']:g}"
        strokes[line] = strokes.get(line, "") + stroke
    return strokes


def _stack(record: Round, x: float, side: float) -> tuple[Rect, ...]:
    """The round's tokens from the bottom up, then the offered ones that were not kept."""
    lost = record.drafted - min(record.accepted, len(record.tokens))
    kinds = [*record.origins, *["withdrawn"] * lost]
    x = min(max(x - side, 0.0), WIDTH - side)
    return tuple(Rect(x, -5 - side * (i + 1), side, side, kind) for i, kind in enumerate(kinds))


def _place_plain(steps: Sequence[tuple[int, float]], scale: _Scale) -> dict[int, str]:
    """Plain decoding's calls, one per token. → a path by line"""
    paths: dict[int, list[str]] = {}
    at = 0.0
    for tokens, seconds in steps:
        for _ in range(tokens):
            for line, x, width in scale.split(at, seconds / tokens):
                gap = min(0.8, width / 3)
                paths.setdefault(line, []).append(f"M{x:.2f} 0h{width - gap:.2f}v{PLAIN:g}h{gap - width:.2f}z")
            at += seconds / tokens
    return {line: "".join(parts) for line, parts in paths.items()}


def _produced(steps: Sequence[tuple[int, float]], until: float) -> int:
    """Tokens that plain decoding has finished by then."""
    done, at = 0, 0.0
    for tokens, seconds in steps:
        if at + seconds > until + 1e-12:
            return done + int((until - at) / seconds * tokens + 1e-9)
        done, at = done + tokens, at + seconds
    return done


def _ticks(line: int, scale: _Scale) -> tuple[tuple[float, str], ...]:
    """(x, milliseconds) along a line."""
    per_line = round(scale.window / scale.ticks)
    return tuple((WIDTH * i / per_line, f"{1000 * scale.ticks * (line * per_line + i):,.6g}") for i in range(per_line + 1))
