"""Ctrl-C while the sequences of a text that has ended are freed: no slot is lost, and none is another's."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.decode import Decoder, Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import ModelDrafter
from outrider.models.cache.slot_cache import SlotCache
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.encoder_decoder import some_source
from tests.helpers.tiny_models import tiny, tiny_encoder_decoder

GREEDY = SamplingSettings()


class InterruptedMoves:
    """The first move of a cache's row that is made within `armed` is interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed, self.interrupted = False, 0
        whole = SlotCache.move

        def move(cache: SlotCache, *given: Any) -> None:
            if self.armed:
                self.armed = False
                self.interrupted += 1
                raise KeyboardInterrupt
            whole(cache, *given)

        monkeypatch.setattr(SlotCache, "move", move)


def test_a_drafts_sequence_is_freed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    moves, target, draft = InterruptedMoves(monkeypatch), tiny("Llama"), tiny("Llama", 1)
    before = len(target._open), len(draft._open)
    ends = ModelDrafter.end

    def end(drafter: ModelDrafter, row: Any) -> None:
        moves.armed = not moves.interrupted
        ends(drafter, row)
        moves.armed = False

    monkeypatch.setattr(ModelDrafter, "end", end)
    requests = [Request([5, 6, 7], count, RandomStream(1, count)) for count in (2, 9, 9)]
    decoder = Decoder(target, requests, GREEDY, ModelDrafter(draft, step_seconds=0.1), FixedLength(2))
    with pytest.raises(KeyboardInterrupt):
        list(decoder.rounds())
    assert moves.interrupted == 1
    assert (len(target._open), len(draft._open)) == before


def test_no_text_reads_anothers_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that the interrupt lost was still taken for one that has read its source, when others had its slot."""
    moves, model = InterruptedMoves(monkeypatch), tiny_encoder_decoder("T5")
    assert isinstance(model, EncoderDecoderModel)
    start, sources = [model.module.config.decoder_start_token_id], [some_source(model, seed) for seed in range(4)]

    def asked(which: int, count: int = 8) -> Request:
        return Request(start, count, RandomStream(3), source=sources[which])

    wanted = decode(model, [asked(1, 30)], GREEDY)[0][0]
    first, other = (Decoder(model, [asked(which, 30)], GREEDY) for which in (0, 1))
    began, rest = first.rounds(), other.rounds()
    next(began)
    got = [token for _, record in next(rest) for token in record.tokens]
    moves.armed = True
    with pytest.raises(KeyboardInterrupt):
        first.close()
    third = Decoder(model, [asked(2, 30), asked(3, 30)], GREEDY)
    next(third.rounds())
    assert decode(model, [asked(1)], GREEDY)[0][0] == wanted[:8]
    got += [token for made in rest for _, record in made for token in record.tokens]  # untouched by another's interrupt
    assert got == wanted
    third.close()
    first.close()
    assert model._open == []
