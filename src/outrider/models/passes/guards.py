"""Sizes that are symbols of a graph, and what its guards say of them: a graph must hold for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from outrider.models.attention.shared_keys import WIDEST

_WIDTHS = range(2, WIDEST + 1)
_LARGE = [size + more for size in (128, 256, 512, 1024, 4096, 1 << 15, 1 << 20) for more in (-1, 0, 1)]
_SIZES = [*_WIDTHS, *_LARGE]


class DecidesError(RuntimeError):
    """The code of a model does other things for other sizes."""


@dataclass(frozen=True)
class Sizes:
    """Of a traced pass, numbers or symbols. source: the longest source of an encoder-decoder's rows."""

    rows: Any
    tokens: Any
    source: Any


def check_free(shapes: Any) -> None:
    """Raise if the graph holds for some contexts only: a symbol was replaced by a number on the way."""
    fixed = {symbol: value for symbol, value in shapes.replacements.items() if not value.free_symbols}
    if fixed:
        raise DecidesError(f"its pass depends on the length of the context: {fixed}")


def check_guards(shapes: Any, columns: Any, capacity: Any, of: Sizes) -> None:
    """Raise if the model's code took a decision by one of the sizes that is another one for other sizes.

    Each decision about one size is tried for every small one and some large ones, others by corners and at random. Sizes of
    1 apart, for which everything is contiguous: that changes what is copied. Whether it changes what is computed, passes
    tell (`recorded`).
    """
    about = ((of.rows, _SIZES), (of.tokens, _WIDTHS), (columns, _SIZES), (capacity, _SIZES), (of.source, _SIZES))
    alone = {size.node.expr: all_of_it for size, all_of_it in about if not isinstance(size, int)}
    for decision in {guard.expr for guard in shapes.guards}:
        found = [symbol for symbol in alone if symbol in decision.free_symbols]
        one = found[0] if len(found) == 1 else None
        tried = _several_sizes(columns, capacity, of) if one is None else ({one: size} for size in alone[one])
        if any(decision.subs(sizes) != True for sizes in tried):  # noqa: E712 - of a computer algebra
            raise DecidesError(f"its pass depends on sizes: {decision}")


def _several_sizes(columns: Any, capacity: Any, of: Sizes) -> Iterator[dict[Any, int]]:
    """Sizes that can come together."""
    corners = [*product((WIDEST, 1 << 20), (2, 1 << 10), (2, WIDEST), (2, 1 << 15))]
    draw = random.Random(0)
    some = [(draw.choice(_LARGE), draw.randint(2, 70), draw.choice(_WIDTHS), draw.choice(_SIZES)) for _ in range(60)]
    for most, high, wide, far in (*corners, *some):
        sizes = ((columns, most), (capacity, 2 * most + 1), (of.rows, high), (of.tokens, wide), (of.source, far))
        yield {symbol.node.expr: size for symbol, size in sizes if not isinstance(symbol, int)}


def symbol(shapes: Any, name: str, size: int) -> Any:
    """A number of the graph, which is `size` while it is traced. shapes: torch's `ShapeEnv`."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = shapes.create_symbol(size, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=size, source=source)
