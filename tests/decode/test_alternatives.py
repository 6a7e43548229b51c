"""Alternatives: tokens scored in the places of drafted ones. The law stays the target's, and a text is told as it came.

What the engines give is in test_alternatives_engines, which ones are scored in test_alternatives_choice.

False-alarm rate as in test_end_to_end_law: each test of a law rejects at p < 1e-6; the seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from torch import Tensor

import outrider.round.run as round_module
from outrider.audit.sources import read_rounds
from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength, Plan
from outrider.drafters import ChoiceDrafter, Drafter, ModelDrafter, PromptLookupDrafter, SpeculativeDrafter
from outrider.drafters.base import DraftContext
from outrider.models.table import TableModel
from outrider.proposal import Alternatives, DraftRow, Proposal
from outrider.randomness import RandomStream
from outrider.records import Round, summarise
from outrider.report.trace_tokens import shown_rounds
from outrider.round import Extras, alternatives
from outrider.sampling import SamplingSettings
from tests.helpers.folders import make_tokenizer
from tests.helpers.marks import slow
from tests.helpers.samples import ALARM, LENGTH, V, p_value, samples_of
from tests.helpers.toys import PROMPT, SETTINGS, table

COSTS = Costs({1: 1.0, 2: 1.1, 5: 1.4})


def run(
    target: TableModel,
    drafter: Drafter,
    settings: SamplingSettings,
    length: DraftLength,
    alternatives: int | None,
    seed: int = 3,
) -> tuple[list[list[int]], list[Round]]:
    samples = samples_of(settings) // (2 if settings.needs_context else 1)
    requests = [Request(PROMPT, LENGTH, RandomStream(seed, i)) for i in range(samples)]
    tokens, rounds = decode(target, requests, settings, drafter, length, alternatives=alternatives)
    return tokens, [record for row in rounds for record in row]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("temperature 1", 1),
        *((name, 2) for name in ("greedy", "temperature 1", "all")),
        *(slow(name, 2) for name in ("top-k", "bias", "penalties")),
    ],
)
def test_the_law_is_the_targets_whatever_is_scored_beside_the_draft(name: str, count: int) -> None:
    target = table(1, V)
    tokens, rounds = run(target, ModelDrafter(table(2, V)), SETTINGS[name], FixedLength(2), count)
    assert p_value(tokens, target, SETTINGS[name]) > ALARM
    assert sum(record.taken for record in rounds) > len(tokens) / 10


@pytest.mark.parametrize(
    "drafter",
    [
        ModelDrafter(table(2, V), SamplingSettings(), 0.3),
        slow(ModelDrafter(table(2, V), SamplingSettings(temperature=0.5, top_k=2), 0.3)),
        slow(ChoiceDrafter([ModelDrafter(table(2, V), step_seconds=0.3), PromptLookupDrafter()])),
        ChoiceDrafter(
            [
                ModelDrafter(table(4, V), step_seconds=0.3),
                SpeculativeDrafter(
                    table(2, V), ModelDrafter(table(3, V), step_seconds=0.1), FixedLength(2), step_seconds=0.2
                ),
            ]
        ),
    ],
    ids=["greedy", "its own sampling", "choice", "choice with a speculative one"],
)
def test_adaptive_alternatives_follow_the_targets_law(drafter: Drafter) -> None:
    target, length = table(1, V), AdaptiveLength(Costs({1: 1.0, 17: 1.05}), longest=4, probe_share=0.3)
    tokens, rounds = run(target, drafter, SETTINGS["temperature 1"], length, None)
    assert p_value(tokens, target, SETTINGS["temperature 1"]) > ALARM
    assert sum(record.taken for record in rounds) > len(tokens) / 100


class AfterAnotherToken(TableModel):
    """Gives the logits after the drafted token where those after the alternative are asked for."""

    def score_beside(self, sequences: Any, tokens: Tensor, lengths: Any, others: Tensor, places: Any) -> Tensor:
        out = super().score_beside(sequences, tokens, lengths, others, places)
        for i, own in enumerate(places):
            for m, place in enumerate(own):
                out[i, lengths[i] + m] = out[i, place]
        return out


class KeepsTheDraft(TableModel):
    """Leaves the rejected token where the alternative belongs."""

    def take_alternative(self, sequence: Any, position: int, m: int) -> None:
        sequence.beside[m] = sequence.tokens[position]
        super().take_alternative(sequence, position, m)


class WithholdsTheUnlikely(ModelDrafter):
    """Bends the law: offers a token it drew only if it is likely, and calls the others alternatives."""

    def propose(self, rows: Sequence[DraftRow], plans: Sequence[Plan], context: DraftContext) -> Proposal:
        made = super().propose(rows, plans, context)
        assert made.probs is not None
        kept = [int(made.probs[i, 0, made.tokens[i, 0]] > 0.5) for i in range(len(rows))]
        beside = Alternatives(made.tokens[:, :1], [[0] if keep else [] for keep in kept])
        return Proposal(made.tokens[:, :1], kept, made.probs[:, :1], None, beside)


@pytest.mark.parametrize("wrong", [AfterAnotherToken, KeepsTheDraft])
def test_engines_that_mix_the_places_up_are_rejected(wrong: type[TableModel]) -> None:
    right = table(1, V)
    tokens, _ = run(wrong(right._probs), ModelDrafter(table(2, V)), SETTINGS["temperature 1"], FixedLength(2), 2)
    assert p_value(tokens, right, SETTINGS["temperature 1"]) < ALARM


def test_withholding_a_drawn_token_is_rejected_all_the_same() -> None:
    target = table(1, V)
    tokens, _ = run(target, WithholdsTheUnlikely(table(2, V)), SETTINGS["temperature 1"], FixedLength(1), 0)
    assert p_value(tokens, target, SETTINGS["temperature 1"]) < ALARM


def test_the_same_number_for_the_bonus_token_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a recovered one must not be drawn by a number that was used before."""
    target = table(1, V)
    monkeypatch.setattr(round_module, "go_on", _with_a_used_number(alternatives.go_on))
    tokens, _ = run(target, ModelDrafter(table(2, V)), SETTINGS["temperature 1"], FixedLength(2), 2)
    assert p_value(tokens, target, SETTINGS["temperature 1"]) < ALARM


def _with_a_used_number(go_on: Any) -> Any:
    class Used:
        def __init__(self, token: int) -> None:
            self.token = token

        def take(self, count: int) -> list[float]:
            return [(self.token + 0.5) / V] * count

    def wrong(scorer: Any, rows: list[DraftRow], outcomes: Any, *rest: Any) -> Any:
        streams = [row.stream for row in rows]
        for row, outcome in zip(rows, outcomes, strict=True):
            row.stream = Used(outcome.tokens[-1])  # type: ignore[assignment]
        try:
            return go_on(scorer, rows, outcomes, *rest)
        finally:
            for row, stream in zip(rows, streams, strict=True):
                row.stream = stream

    return wrong


class SameBits(TableModel):
    """An engine that promises the same bits in any pass: greedy, what follows an alternative must be far ahead then."""

    same_bits = True


def test_rows_whose_next_token_is_far_ahead_go_on_and_the_others_are_scored_anew() -> None:
    target, settings = SameBits(table(1, V)._probs), SETTINGS["greedy"]
    requests = [Request([i % V], 40, RandomStream(3, i)) for i in range(12)]
    plain, _ = decode(target, requests, settings)
    anyhow, all_of_them = decode(table(1, V), requests, settings, ModelDrafter(table(2, V)), FixedLength(3), alternatives=2)
    careful, some_of_them = decode(target, requests, settings, ModelDrafter(table(2, V)), FixedLength(3), alternatives=2)
    assert careful == anyhow == plain
    taken = [sum(record.taken for row in rounds for record in row) for rounds in (some_of_them, all_of_them)]
    assert 0 < taken[0] < taken[1]


@pytest.mark.parametrize("setting", ["greedy", "temperature 1", "all"])
def test_what_a_row_draws_depends_neither_on_its_company_nor_on_what_is_reported(setting: str) -> None:
    target, prompts = table(1, V), [[0, 1], [2], [1, 0, 2, 1, 0]]

    def requests() -> list[Request]:
        return [Request(p, n, RandomStream(6, i)) for i, (p, n) in enumerate(zip(prompts, (30, 9, 20), strict=True))]

    def texts(which: list[Request], extras: Extras) -> list[list[int]]:
        length = AdaptiveLength(COSTS, longest=4)
        drafter = ModelDrafter(table(2, V), step_seconds=0.1)
        return decode(target, which, SETTINGS[setting], drafter, length, extras)[0]

    together = texts(requests(), Extras())
    assert together == texts(requests(), Extras(logprobs=True, betas=True, drafts=True))
    assert together == [texts([request], Extras())[0] for request in requests()]


def test_the_draft_goes_on_from_what_was_kept() -> None:
    """Nothing of a rejected token stays in the draft's cache: each greedy draft is what a fresh draft would say."""
    target, draft = table(1, 5), table(2, 5)
    request = Request(PROMPT, 80, RandomStream(4))
    sampling = SamplingSettings(temperature=1.0)
    (tokens,), (rounds,) = decode(
        target,
        [request],
        sampling,
        ModelDrafter(draft, SamplingSettings()),
        FixedLength(3),
        Extras(drafts=True),
        alternatives=3,
    )
    assert sum(record.taken for record in rounds) > 5
    at = 0
    for record in rounds:
        text = [*PROMPT, *tokens[:at]]
        for drafted in record.drafts or ():
            assert drafted == int(draft.probs_after(text).argmax())
            text.append(drafted)
        at += len(record.tokens)


@pytest.mark.parametrize("setting", ["greedy", "temperature 1"])
def test_log_probabilities_are_those_along_the_text(setting: str) -> None:
    target = table(1, 5)
    request = Request(PROMPT, 60, RandomStream(4))
    drafter = ModelDrafter(table(2, 5))
    (tokens,), (rounds,) = decode(
        target, [request], SETTINGS[setting], drafter, FixedLength(2), Extras(logprobs=True), alternatives=3
    )
    found = [value for record in rounds for value in record.logprobs or ()]
    wanted = [float(target.probs_after([*PROMPT, *tokens[:i]])[token].log()) for i, token in enumerate(tokens)]
    assert found == pytest.approx(wanted)
    assert any(record.taken for record in rounds)


def test_a_round_tells_where_its_tokens_come_from() -> None:
    record = Round((4, 5, 6), drafted=3, accepted=1, drafter="d", alternatives=4, taken=True)
    assert record.origins == ("accepted", "recovered", "bonus")
    assert (record.scored, record.tested) == (8, 2)
    stats = summarise([record, Round((1,), 0, 0, None)])
    assert (stats.alternatives, stats.taken, stats.acceptance_rate, stats.mean_acceptance_length) == (4, 1, 0.5, 2.0)
    assert {"alternatives": 4, "taken": 1}.items() <= stats.to_dict().items()
    assert read_rounds([[3, 3, 1]], [4, 5, 6])[0].accepted == 1
    with pytest.raises(ValueError, match="a round can't be"):
        read_rounds([[3, 1, 1]], [4, 5, 6])


def test_a_text_ends_with_an_end_token_that_was_an_alternative() -> None:
    target, draft = table(1, V), table(2, V)
    ends = frozenset({2})
    requests = [Request(PROMPT, 30, RandomStream(8, i), ends) for i in range(300)]
    tokens, rounds = decode(target, requests, SETTINGS["temperature 1"], ModelDrafter(draft), FixedLength(2), alternatives=2)
    assert all(row.index(2) == len(row) - 1 for row in tokens if 2 in row)
    last = [row[-1] for row in rounds]
    assert any(record.taken and record.origins[-1] == "recovered" for record in last)  # and the bonus token was dropped
    assert all(len(record.tokens) <= record.accepted + 1 + record.taken for row in rounds for record in row)


def test_an_expert_draft_needs_fewer_rounds_with_alternatives() -> None:
    """The point of it: with the same draft, the same seed's texts take fewer passes."""
    target, draft = table(1, 8, sharpness=1.0), table(1, 8, sharpness=0.6)
    sampling = SamplingSettings(temperature=1.0)

    def rounds(count: int) -> int:
        requests = [Request(PROMPT, 200, RandomStream(2, i)) for i in range(4)]
        made = decode(target, requests, sampling, ModelDrafter(draft), FixedLength(2), alternatives=count)[1]
        return sum(map(len, made))

    assert rounds(3) < 0.95 * rounds(0)


def test_a_trace_shows_the_alternative_where_it_stood() -> None:
    record = Round(
        (1, 2, 3), 4, 1, "d", drafts=(1, 9, 8, 7), betas=(0.1, 0.2, 0.3, 0.4), alternatives=2, taken=True, seconds={}
    )
    (shown,) = shown_rounds(make_tokenizer(), [5], [record])
    assert [token.number for token in shown.before] == [1]
    assert [token.number for token in shown.withdrawn] == [9, 8, 7]
    assert shown.last is not None
    assert shown.further is not None
    assert (shown.last.number, shown.last.position, shown.last.beta) == (2, 2, 0.2)
    assert (shown.further.number, shown.further.position, shown.further.beta) == (3, None, None)
    assert "2 alternatives scored beside, one of them came" in shown.summary
    assert [token.number for token in shown.kept] == [1, 2, 3]


def test_a_text_may_end_before_all_of_its_last_round() -> None:
    for keep in (0, 1):
        requests = [Request((0,), 30, RandomStream(1, i), stop=partial(_keeping, keep)) for i in range(60)]
        tokens, _ = decode(
            table(1, 4), requests, SETTINGS["temperature 1"], ModelDrafter(table(2, 4)), FixedLength(2), alternatives=3
        )
        assert all(len(row) == keep for row in tokens)


def _keeping(count: int, new: Sequence[int]) -> int:
    del new
    return count
