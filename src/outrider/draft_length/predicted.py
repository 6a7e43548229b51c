"""Recorded rounds by the cost tables: what they should have taken, and what an oracle would have needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from outrider.costs import Costs, DraftSeconds
from outrider.draft_length.kept_widths import KeptWidths
from outrider.records import Round

_NOTHING = DraftSeconds()


def _contexts(rounds: Iterable[Round], prompt_tokens: int) -> Iterator[tuple[Round, int]]:
    for record in rounds:
        yield record, prompt_tokens
        prompt_tokens += len(record.tokens)


def passes(rounds: Iterable[Round], prompt_tokens: int) -> list[tuple[int, int, float]]:
    """(tokens scored, context, seconds) of the target's pass of each round, the sampling after it included."""
    return [
        (record.scored, context, record.seconds["verify"] + record.seconds.get("sampling", 0.0))
        for record, context in _contexts(rounds, prompt_tokens)
        if "verify" in record.seconds
    ]


def predicted_seconds(
    rounds: Iterable[Round], costs: Costs, drafting: Mapping[str, DraftSeconds], prompt_tokens: int
) -> float:
    """Seconds of the rounds with the lengths that they had. drafting: of each drafter; nothing by others.

    Of an engine that keeps the width of its passes, with the widths that they had, and what the changes took.
    """
    kept = KeptWidths(costs)
    return sum(
        costs.verify(record.scored, context)
        + kept.follow(record.drafted, context)
        + drafting.get(record.drafter or "", _NOTHING).of(record.drafted)
        for record, context in _contexts(rounds, prompt_tokens)
    )


def plain_seconds(rounds: Iterable[Round], costs: Costs, prompt_tokens: int) -> float:
    """Seconds of plain decoding for the same tokens."""
    return sum(seconds for _, seconds in plain_steps(rounds, costs, prompt_tokens))


def plain_steps(rounds: Iterable[Round], costs: Costs, prompt_tokens: int) -> list[tuple[int, float]]:
    """(tokens, seconds) of plain decoding for each round's tokens."""
    return [
        (len(record.tokens), sum(costs.verify(1, context + place) for place in range(len(record.tokens))))
        for record, context in _contexts(rounds, prompt_tokens)
    ]


def oracle_seconds(rounds: Iterable[Round], costs: Costs, drafting: DraftSeconds, prompt_tokens: int) -> float:
    """Seconds if each round had drafted exactly what was accepted, or nothing where that is quicker.

    Leviathan 3.5: up to 60 % better than a fixed gamma. A round that accepted everything might have gone on, so the longer
    the recorded drafts, the closer this comes to the true bound. Changes of a pass's width are left out. A recovered token
    that was an alternative counts as one that this oracle would have drafted.
    """
    total = 0.0
    for record, context in _contexts(rounds, prompt_tokens):
        right = record.used + record.taken
        exact = drafting.of(right) + costs.verify(right + 1, context)
        total += min(exact, (right + 1) * costs.verify(1, context))
    return total
