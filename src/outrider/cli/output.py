"""How generated text and figures look on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from outrider.generation import Piece
    from outrider.records import Stats

STYLES = {"accepted": "green", "bonus": "cyan", "recovered": "bold yellow", "target": "default", "prompt": "dim"}
MEANING = {
    "accepted": "from the draft",
    "bonus": "target, after a fully accepted draft",
    "recovered": "target, after a rejection",
    "target": "target, nothing drafted",
}


def print_piece(console: Console, piece: Piece) -> None:
    """One piece of text in the colour of its origin."""
    console.print(Text(str(piece), style=STYLES[piece.origin]), end="", soft_wrap=True, highlight=False)


def legend() -> Text:
    """What the colours mean."""
    parts = [Text("■ ", style=STYLES[key]).append(Text(text, style="dim")) for key, text in MEANING.items()]
    return Text("  ").join(parts)


def describe(stats: Stats) -> str:
    """One line of figures."""
    rate = "no drafts" if stats.acceptance_rate is None else f"acceptance rate {stats.acceptance_rate:.2f}"
    return (
        f"{stats.tokens} tokens in {stats.rounds} rounds ({stats.mean_acceptance_length:.2f} a round), {rate}, "
        f"{stats.tokens_per_second:.1f} tokens/s, {100 * stats.overhead:.1f} % outside the models"
    )
