"""How generated text and figures look on a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from outrider.bench.profile import Profile
    from outrider.pieces import Piece
    from outrider.records import Stats

STYLES = {
    "accepted": "green",
    "lenient": "bold magenta",
    "bonus": "cyan",
    "recovered": "bold yellow",
    "target": "default",
    "prompt": "dim",
}
MEANING = {
    "accepted": "from the draft",
    "bonus": "target, after a fully accepted draft",
    "recovered": "target, after a rejection",
    "target": "target, nothing drafted",
}


def wide_console() -> Console:
    """For tables on standard output: as wide as the terminal, and wide enough for any table in a file or pipe."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=140)


@contextmanager
def notes_held() -> Iterator[None]:
    """Warnings meanwhile are told afterwards: not in the middle of a line of text."""
    root = logging.getLogger()
    handlers = root.handlers
    root.handlers = [MemoryHandler(1000, logging.CRITICAL + 1, target=one) for one in handlers]
    try:
        yield
    finally:
        held, root.handlers = root.handlers, handlers
        for one in held:
            one.close()  # which hands on what it has


def print_piece(console: Console, piece: Piece) -> None:
    """One piece of text in the colour of its origin."""
    console.print(Text(str(piece), style=STYLES[piece.origin]), end="", soft_wrap=True, highlight=False)


def legend() -> Text:
    """What the colours mean, where nothing is lossy."""
    parts = [Text("■ ", style=STYLES[key]).append(Text(text, style="dim")) for key, text in MEANING.items()]
    return Text("  ").join(parts)


def describe(stats: Stats) -> str:
    """One line of figures."""
    rate = "no drafts" if stats.acceptance_rate is None else f"acceptance rate {stats.acceptance_rate:.2f}"
    if stats.alternatives:
        rate += f", {stats.taken} of {stats.alternatives} alternatives came"
    if stats.lenience < 1.0:
        rate += f", LOSSY (lenience {stats.lenience:g}: {stats.lenient} tokens by it alone)"
    return (
        f"{stats.tokens} tokens in {stats.rounds} rounds ({stats.mean_acceptance_length:.2f} a round), {rate}, "
        f"{stats.tokens_per_second:.1f} tokens/s, {100 * stats.overhead:.1f} % outside the models"
    )


def show_profile(profile: Profile) -> None:
    """Milliseconds a round by phase, and bytes a second by model, on standard error."""
    from rich.table import Table

    table = Table("", "ms a round", "share", title=f"{profile.rounds} rounds, {profile.tokens} tokens")
    decoding = sum(profile.seconds[phase] for phase in profile.phases) or 1.0
    for phase in profile.phases:
        milliseconds = 1000 * profile.seconds[phase] / max(profile.rounds, 1)
        table.add_row(phase, f"{milliseconds:.2f}", f"{100 * profile.seconds[phase] / decoding:.1f} %")
    console = Console(stderr=True)
    console.print(table)
    machine = profile.machine_bandwidth
    for reading in profile.readings:
        each = 1000 * reading.seconds / max(reading.passes, 1)
        line = f"{reading.model}: {reading.passes} passes, {each:.2f} ms each"
        if reading.bandwidth is not None and reading.weight_bytes is not None:
            line += (
                f", {reading.weight_bytes / 1e9:.2f} GB of weights: {reading.bandwidth / 1e9:.1f} GB/s, "
                f"{100 * reading.bandwidth / machine:.0f} % of what this machine reads ({machine / 1e9:.1f} GB/s)"
            )
        console.print(line, highlight=False, soft_wrap=True)
