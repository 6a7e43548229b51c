"""A batch of rows that join and leave: what a row draws depends on the row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.costs import Costs
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, LengthState
from outrider.drafters import ChoiceDrafter, Drafter, ModelDrafter, PromptLookupDrafter, SpeculativeDrafter, SuffixDrafter
from outrider.randomness import RandomStream
from outrider.round.several import _laws
from outrider.sampling import Context, SamplingSettings, standardize
from tests.helpers.toys import SETTINGS, table

SAMPLED = SamplingSettings(temperature=1.0)
COSTS = Costs({1: 1.0, 9: 2.0})


def table_drafter(kind: str) -> Drafter:
    drafter = ModelDrafter(table(1, 5), step_seconds=0.2)
    if kind == "choice":
        return ChoiceDrafter([drafter, PromptLookupDrafter()])
    if kind == "nested":
        return SpeculativeDrafter(table(1, 5), PromptLookupDrafter(), AdaptiveLength(COSTS), step_seconds=0.2)
    return drafter if kind == "model" else SuffixDrafter()


def request(number: int, tokens: int) -> Request:
    return Request([number % 5, 1, number % 3], tokens, RandomStream(7, number))


def alone(number: int, tokens: int, kind: str) -> list[int]:
    found, _ = decode(table(0, 5), [request(number, tokens)], SAMPLED, table_drafter(kind), AdaptiveLength(COSTS))
    return found[0]


def in_company(lengths: list[int], places: int, kind: str, policy: DraftLength) -> dict[int, list[int]]:
    """Rows that join as places become free."""
    decoder = Decoder(table(0, 5), [], SAMPLED, table_drafter(kind), policy)
    waiting = list(enumerate(lengths))
    tokens: dict[int, list[int]] = {}
    while True:
        room = places - len(decoder.rows)
        joining, waiting = waiting[:room], waiting[room:]
        rows = decoder.admit([request(number, length) for number, length in joining])
        assert [row.number for row in rows] == [number for number, _ in joining]
        if not (made := decoder.step()):
            return tokens
        for number, record in made:
            tokens.setdefault(number, []).extend(record.tokens)
        decoder.dismiss()
        assert len(decoder.rows) <= places


@pytest.mark.parametrize("kind", ["model", "choice", "nested", "suffix"])
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6), places=st.integers(1, 4))
def test_a_rows_draws_do_not_depend_on_the_rows_beside_it(kind: str, lengths: list[int], places: int) -> None:
    got = in_company(lengths, places, kind, AdaptiveLength(COSTS))
    assert got == {number: alone(number, length, kind) for number, length in enumerate(lengths)}


class Shared(DraftLength):
    """What must not be: one policy that learns from all rows."""

    def __init__(self) -> None:
        self._state = AdaptiveLength(COSTS).start()

    def start(self) -> LengthState:
        return self._state


def test_a_policy_that_learns_from_all_rows_would_show() -> None:
    lengths = [14, 13, 12, 11, 14, 12]
    assert in_company(lengths, 3, "model", Shared()) != {i: alone(i, n, "model") for i, n in enumerate(lengths)}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_lies_behind_a_rows_draft_is_left_out_and_changes_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 4, 50, generator=generator)
    drafted = [0, 3, 0, 1, 0]
    contexts = [
        Context(torch.randint(0, 50, (6 + j,), generator=generator), 3, "unused" if j > n else "drafted" if j else "certain")
        for n in drafted
        for j in range(4)
    ]
    whole, own = standardize(logits, SETTINGS[name], contexts), _laws(logits, SETTINGS[name], contexts, drafted)
    for i, n in enumerate(drafted):
        assert torch.equal(own[i, : n + 1], whole[i, : n + 1])
    if SETTINGS[name].top_p < 1.0:
        assert not own[0, 1:].any()
    else:
        assert torch.equal(own, whole)
