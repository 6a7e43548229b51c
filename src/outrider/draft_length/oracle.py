"""What knowing the acceptance beforehand would be worth (Leviathan 3.5: up to 60 % over a fixed gamma).

From a recorded run with long drafts: a round that drafted k and accepted a tokens would, with an oracle, have drafted
exactly a, saved the rest, and yielded the same a + 1 tokens. A round that accepted everything might have gone on, so the
longer the recorded drafts, the closer this comes to the true bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from outrider.costs import Costs
from outrider.records import Round


def oracle_seconds(rounds: Iterable[Round], costs: Costs, step_seconds: float) -> float:
    """Seconds of the recorded rounds if each had drafted what was accepted, or nothing where that is quicker."""
    total = 0.0
    for record in rounds:
        exact = record.accepted * step_seconds + costs.verify(record.accepted + 1)
        plain = (record.accepted + 1) * costs.verify(1)
        total += min(exact, plain)
    return total
