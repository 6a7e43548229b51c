"""Rounds of several decoders at once: rows that are sampled otherwise have a decoder each, and share the target's passes.

A pass knows nothing of how its rows are sampled. Drafting and the rule do, and are done group by group.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from outrider.records import Round
from outrider.round import verify_together
from outrider.support.alone import Alone

if TYPE_CHECKING:
    from outrider.decode.loop import Decoder
    from outrider.decode.one_round import OneRound

Made = list[tuple[int, Round]] | Exception
"""A decoder's rows and their rounds, or what its own settings raised (a processor of the user's, say)."""


def step_together(decoders: Many[Decoder]) -> list[Made]:
    """One round of all unfinished rows of decoders with one target and one clock, scored in one pass. → of each, its rounds

    What the pass raises, raises, and none of them can go on; what a decoder's own settings raise is its alone.
    """
    busy = [decoder for decoder in decoders if decoder.active]
    made: dict[int, Made] = {}
    if busy:
        for decoder in busy:
            decoder.begin()
        alone = busy[0].alone if len(busy) == 1 else Alone([engine for one in busy for engine in one.engines])
        alone.run(_round, busy, made)
    return [made.get(id(decoder), []) for decoder in decoders]


def _round(decoders: list[Decoder], made: dict[int, Made]) -> None:
    clock = decoders[0].clock
    clock.take()  # what the caller did since the last round is not ours
    sharing = sum(len(decoder.active) for decoder in decoders)
    parts: list[tuple[Decoder, OneRound]] = []
    for decoder in decoders:
        try:
            parts.append((decoder, decoder.part_of_round(sharing)))
        except Exception as error:
            made[id(decoder)] = error
    settled = []
    outcomes = verify_together([part.group for _, part in parts]) if parts else []
    for (decoder, part), own in zip(parts, outcomes, strict=True):
        try:
            if isinstance(own, Exception):
                raise own
            part.settle(own)
            settled.append((decoder, part))
        except Exception as error:
            made[id(decoder)] = error
    seconds = {phase: value / sharing for phase, value in clock.take().items()}
    for decoder, part in settled:
        made[id(decoder)] = part.records(seconds, decoder.close_row)
        decoder.done()
