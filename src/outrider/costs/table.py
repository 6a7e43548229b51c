"""What a pass costs: seconds to score n new tokens. Neither flat nor monotone in n, and growing with the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

CONTEXT = 64
PADDING_GAIN = 0.97  # pad only for a gain of 3 % and more
STEP = 32
REMEMBERED = 4096


@runtime_checkable
class PadsWidths(Protocol):
    """An engine whose kernels like some widths better than others."""

    def pad_widths(self, width: Callable[[int, int], int]) -> None: ...


@dataclass(frozen=True)
class Costs:
    """What a pass of a model takes.

    verify_seconds: {new tokens of each row of the pass: seconds} after `context` tokens, 1 included. per_token: {new tokens:
    further seconds for each further token of context}. padded: passes are scored at a wider width where that is quicker.
    rows: of a pass. company: of them, those that are all made as wide as the widest; 1 where a row costs what its own tokens
    do. change: further seconds of a pass that is wider or narrower than the one before. warm: what a pass of one token takes
    less right after another of the same model than after one of the model that it follows (`pass_timer.Follows`).
    """

    verify_seconds: Mapping[int, float]
    per_token: Mapping[int, float] = field(default_factory=dict)
    context: int = CONTEXT
    padded: bool = False
    company: int = 1
    change: float = 0.0
    warm: float = 0.0
    rows: int = 1
    _found: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _widths: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _passes: dict[int, _Passes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def verify(self, tokens: int, context: int | None = None) -> float:
        """Seconds to score that many tokens after a context, linear between the measured sizes and beyond them."""
        context = self.context if context is None else context
        return self._seconds(self.width(tokens, context) if self.padded else tokens, context)

    def near(self, context: int) -> Mapping[int, float]:
        """`verify` after the next lower multiple of `STEP` tokens, by how many are scored: policies ask for many lengths in
        each round, of each row.
        """
        known = self._passes.get(context // STEP)
        if known is None:
            if len(self._passes) >= REMEMBERED:
                self._passes.clear()
            known = self._passes[context // STEP] = _Passes(self, context // STEP * STEP)
        return known

    def about(self, tokens: int, context: int) -> float:
        """One of these."""
        return self.near(context)[tokens]

    def width(self, tokens: int, context: int) -> int:
        """The measured width of that many tokens or more at which a pass is quickest; itself if none gains.

        Policies ask for every length several times in a round: it is looked for once in so many tokens of context.
        """
        asked = (tokens, context // STEP)
        if asked not in self._widths:
            if len(self._widths) >= REMEMBERED:
                self._widths.clear()
            self._widths[asked] = self._quickest(tokens, context // STEP * STEP)
        return self._widths[asked]

    def _quickest(self, tokens: int, context: int) -> int:
        wider = [size for size in self.verify_seconds if size > tokens]
        if not wider:
            return tokens
        best = min(wider, key=lambda size: (self._seconds(size, context), size))
        return best if self._seconds(best, context) < PADDING_GAIN * self._seconds(tokens, context) else tokens

    def _seconds(self, tokens: int, context: int) -> float:
        """Of a pass as wide as that; the table is looked up once for each width."""
        if tokens not in self._found:
            slope = _between(self.per_token, tokens) if self.per_token else 0.0
            self._found[tokens] = (_between(self.verify_seconds, tokens), slope)
        seconds, slope = self._found[tokens]
        return max(seconds + slope * max(0, context - self.context), 1e-9)

    def of_rows(self, share: float, sizes: Iterable[int]) -> Costs:
        """Of so many tokens each in `share` times as many rows, as this is of passes of as many tokens in all."""
        seconds = {n: _between(self.verify_seconds, n * share) for n in sizes}
        return replace(self, verify_seconds=seconds, per_token={n: share * t for n, t in self.per_token.items()})

    def shared_by(self, rows: int, many: Costs, sizes: Iterable[int]) -> Costs:
        """Of a pass of so many rows, as this is of one row and `many` of more: a few tokens in other rows cost what they do
        in one, and each row has its own context.
        """
        widest = max(self.verify_seconds)
        in_all = {n: n * rows for n in sizes}
        seconds = {
            n: _between(self.verify_seconds, t) if t <= widest else _between(many.verify_seconds, t / many.rows)
            for n, t in in_all.items()
        }
        slopes = {n: rows * slope for n, slope in self.per_token.items()}
        return replace(self, verify_seconds=seconds, per_token=slopes, change=many.change, rows=rows)

    def towards(self, rows: int, many: Costs) -> Costs:
        """The same in even steps from one row to `many`: where each row has logits of its own, whatever its tokens."""
        share = (rows - 1) / (many.rows - 1)

        def mixed(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
            return {n: (1.0 - share) * seconds + share * _between(other, n) for n, seconds in one.items()} if other else {}

        seconds, slopes = mixed(self.verify_seconds, many.verify_seconds), mixed(self.per_token, many.per_token)
        warm = (1.0 - share) * self.warm + share * many.warm
        return replace(self, verify_seconds=seconds, per_token=slopes, change=many.change, warm=warm, rows=rows)

    def times(self, factor: float) -> Costs:
        """Of passes that take so many times as long."""
        seconds, slopes = ({n: factor * t for n, t in held.items()} for held in (self.verify_seconds, self.per_token))
        change, warm = factor * self.change, factor * self.warm
        return replace(self, verify_seconds=seconds, per_token=slopes, change=change, warm=warm)

    def to_dict(self) -> dict[str, object]:
        """For JSON, without `padded`; `from_dict` reads it back."""
        held: dict[str, object] = {"seconds": dict(self.verify_seconds), "per_token": dict(self.per_token)}
        held["context"] = self.context
        further = {
            "company": (self.company, 1),
            "change": (self.change, 0.0),
            "warm": (self.warm, 0.0),
            "rows": (self.rows, 1),
        }
        return held | {name: value for name, (value, usual) in further.items() if value != usual}

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> Costs:
        """What `to_dict` gave."""
        seconds, slopes = ({int(n): float(s) for n, s in held[name].items()} for name in ("seconds", "per_token"))
        company, change, warm = int(held.get("company", 1)), float(held.get("change", 0.0)), float(held.get("warm", 0.0))
        rows = int(held.get("rows", 1))
        return cls(seconds, slopes, int(held["context"]), company=company, change=change, warm=warm, rows=rows)


class _Passes(dict[int, float]):
    """Seconds by how many tokens are scored, after a context; filled in as they are asked for."""

    def __init__(self, costs: Costs, context: int) -> None:
        super().__init__()
        self._costs, self._context = costs, context

    def __missing__(self, tokens: int) -> float:
        seconds = self[tokens] = self._costs.verify(tokens, self._context)
        return seconds


def _between(table: Mapping[int, float], size: float) -> float:
    """The value at a size, linear between those given and beyond them."""
    if size in table:
        return table[int(size)]
    sizes = sorted(table)
    if len(sizes) == 1:
        return table[sizes[0]]
    at = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[at - 1], sizes[at]
    return table[low] + (table[high] - table[low]) / (high - low) * (size - low)
