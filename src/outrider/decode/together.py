"""Rounds of several decoders at once: rows that are sampled otherwise have a decoder each, and share the target's passes.

A pass knows nothing of how its rows are sampled. Drafting and the rule do, and are done group by group.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING

from outrider.errors import ParameterError
from outrider.prefill import go_on_by_known, prefill
from outrider.records import Round
from outrider.round import verify_together
from outrider.support.alone import Alone

if TYPE_CHECKING:
    from outrider.decode.loop import Decoder
    from outrider.decode.one_round import OneRound
    from outrider.decode.row import Row

BLOCK = 64  # tokens: parts of prompts end at multiples of it, where engines that share beginnings can

Made = list[tuple[int, Round]] | Exception
"""A decoder's rows and their rounds, or what its own settings raised (a processor of the user's, say)."""


def read_together(decoders: Many[Decoder], tokens: int | None = None, shortest_first: bool = False) -> None:
    """Read on in the prompts of rows that have joined unread, of several decoders with one target and one clock.

    tokens: about so many, of those that joined first, or (shortest_first) have least to read; None: all. Rows that can't be
    read, or for which drafts can't begin, end (`Row.error`); all others go on.
    """
    busy = [decoder for decoder in decoders if decoder.reading]
    if busy:
        _alone_with(busy).run(_read, busy, tokens, shortest_first, _company(decoders))


def _company(decoders: Many[Decoder]) -> int:
    """How many rows share passes, or will as soon as their prompts are read: what drafts are worth is for so many."""
    return sum(len(decoder.active) + len(decoder.reading) for decoder in decoders)


def _read(decoders: list[Decoder], tokens: int | None, shortest_first: bool, company: int) -> None:
    _begin(decoders)
    clock, target = decoders[0].clock, decoders[0].target
    clock.take()
    reading = [row for decoder in decoders for row in decoder.reading]
    go_on_by_known(target, [row.sequence for row in reading], [row.unread for row in reading])
    chosen, texts = _to_read(reading, tokens, shortest_first)
    asked = {row.order: (text, row.sequence.length) for row, text in zip(chosen, texts, strict=True)}

    def read(rows: list[Row]) -> None:
        with clock.phase("prefill"):
            prefill(target, [row.sequence for row in rows], [asked[row.order][0] for row in rows])

    def unread(row: Row) -> None:
        row.sequence.truncate(min(row.sequence.length, asked[row.order][1]))  # some engines have gone on with a part of it

    _with_those_that_can(chosen, read, unread)
    for decoder in decoders:
        ready = [row for row in decoder.reading if row.left_to_read == 0]
        _with_those_that_can(ready, partial(decoder.let_go, company=company), decoder.take_back)
        decoder.close_failed()
        decoder.done()
    seconds = clock.take()["prefill"]
    for row in chosen:
        row.prefill_seconds += seconds / len(chosen)


def _with_those_that_can(rows: list[Row], act: Callable[[list[Row]], None], undo: Callable[[Row], None]) -> None:
    """Do something with all rows at once; if that raises, with each by itself: rows that it raises for end by that."""
    failed = _raised(act, rows)
    if failed is None:
        return
    errors: list[Exception | None] = []
    for row in rows:
        undo(row)
        errors.append(failed if len(rows) == 1 else _raised(act, [row]))
    for row, error in zip(rows, errors, strict=True):
        if error is not None:
            row.fail(error, alone=None in errors)


def _raised(act: Callable[[list[Row]], None], rows: list[Row]) -> Exception | None:
    try:
        act(rows)
    except Exception as error:
        clear_frames(error.__traceback__)  # which hold what the pass has made: the next one may need that memory
        return error
    return None


def _to_read(rows: list[Row], tokens: int | None, shortest_first: bool) -> tuple[list[Row], list[list[int]]]:
    """Whose prompts to read in, and up to where: their prompts' beginnings."""
    if tokens is None:
        return rows, [row.unread for row in rows]
    chosen, texts = [], []
    for row in sorted(rows, key=lambda one: (one.left_to_read if shortest_first else 0, one.order)):
        if tokens <= 0 < row.left_to_read:
            break
        chosen.append(row)
        end = row.sequence.length + tokens
        if end < len(row.unread) and end - end % BLOCK > row.sequence.length:
            end -= end % BLOCK
        texts.append(row.unread[:end])
        tokens -= row.left_to_read
    return chosen, texts


def step_together(decoders: Many[Decoder]) -> list[Made]:
    """One round of all unfinished rows of decoders with one target and one clock, scored in one pass. → of each, its rounds

    What the pass raises, raises, and none of them can go on; what a decoder's own settings raise is its alone.
    """
    busy = [decoder for decoder in decoders if decoder.active]
    made: dict[int, Made] = {}
    if busy:
        _begin(busy)
        _alone_with(busy).run(_round, busy, made, _company(decoders))
    return [made.get(id(decoder), []) for decoder in decoders]


def _begin(decoders: list[Decoder]) -> None:
    """All of them or none."""
    first = decoders[0]
    if any(one.target is not first.target or one.clock is not first.clock for one in decoders):
        raise ParameterError("decoders must have one target and one clock, to share passes: give each the others'")
    for decoder in decoders:
        decoder.check_order()
    for decoder in decoders:
        decoder.begin()


def _alone_with(decoders: list[Decoder]) -> Alone:
    if len(decoders) == 1:
        return decoders[0].alone
    return Alone([engine for decoder in decoders for engine in decoder.engines])


def _round(decoders: list[Decoder], made: dict[int, Made], company: int) -> None:
    clock = decoders[0].clock
    clock.take()  # what the caller did since the last round is not ours
    sharing = sum(len(decoder.active) for decoder in decoders)
    parts: list[tuple[Decoder, OneRound]] = []
    for decoder in decoders:
        try:
            parts.append((decoder, decoder.part_of_round(company)))
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
        try:
            made[id(decoder)] = part.records(seconds, decoder.retire)
            decoder.done()
        except Exception as error:
            made[id(decoder)] = error
