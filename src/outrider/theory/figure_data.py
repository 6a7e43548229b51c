"""What a figure is before it is drawn: named curves on panels, as numbers that can be printed, tested and fingerprinted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Literal


@dataclass(frozen=True)
class Curve:
    """y over x, point by point; None where there is no finite value. style: a line, or points (measured values)."""

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    style: Literal["line", "points"] = "line"


@dataclass(frozen=True)
class Panel:
    """One pair of axes. reference: a value to compare with (plain decoding, say). steps: y is constant between jumps."""

    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    reference: float | None = None
    steps: bool = False


@dataclass(frozen=True)
class FigureData:
    """One figure. source: whose it is and which equation. text: what there is to see."""

    name: str
    title: str
    source: str
    text: str
    panels: tuple[Panel, ...]

    def rows(self) -> Iterator[tuple[str, str, str, float, float | None]]:
        """(figure, panel, curve, x, y) of every point."""
        for panel in self.panels:
            for curve in panel.curves:
                for x, y in zip(curve.x, curve.y, strict=True):
                    yield self.name, panel.y_label, curve.label, x, y

    def to_dict(self) -> dict[str, object]:
        """For machine-readable output."""
        return asdict(self)

    def digest(self) -> str:
        """A fingerprint of the data, to six digits, by which a committed picture is known to be of today's numbers."""
        points = [(panel, label, f"{x:.6g}", f"{y:.6g}" if y is not None else "") for _, panel, label, x, y in self.rows()]
        return sha256(json.dumps([self.title, self.text, points]).encode()).hexdigest()[:16]


def family(
    label: str, values: Sequence[float], x: Sequence[float], value: Callable[[float, float], float]
) -> tuple[Curve, ...]:
    """One curve for each of `values`: value(x, that one)."""
    return tuple(Curve(label.format(one), tuple(x), tuple(value(point, one) for point in x)) for one in values)
