"""Alternatives: tokens scored in the places of drafted ones. The law stays the target's, the engines give what they would
have given had the tokens stood there, and nothing of what was rejected is left behind.

False-alarm rate as in test_end_to_end_law: each test of a law rejects at p < 1e-6; the seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider.round as round_module
from outrider.audit.sources import read_rounds
from outrider.costs import Costs, DraftSeconds
from outrider.decode import Request, decode
from outrider.device_data import pad_rows
from outrider.draft_length import AdaptiveLength, DraftLength, FixedLength, Plan
from outrider.draft_length.base import Prospect, Trial
from outrider.draft_length.predicted import oracle_seconds, predicted_seconds
from outrider.draft_length.signals import LEAST_LIKELY, Shares, likely_class
from outrider.drafters import ChoiceDrafter, Drafter, EarlyExitDrafter, ModelDrafter, PromptLookupDrafter, SpeculativeDrafter
from outrider.drafters.base import DraftContext, check_alternatives
from outrider.errors import ParameterError
from outrider.models.base import LanguageModel, scores_alternatives
from outrider.models.table import TableModel
from outrider.models.transformers_model import TransformersModel
from outrider.proposal import Alternatives, DraftRow, Proposal
from outrider.randomness import RandomStream
from outrider.records import Round, summarise
from outrider.report.trace_tokens import shown_rounds
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.conftest import make_tokenizer
from tests.ragged import reference, some_tokens
from tests.test_end_to_end_law import ALARM, LENGTH, SAMPLES, V, p_value
from tests.tiny_models import CONFIGS, VOCABULARY, module, record_now, tiny, tiny_encoder_decoder
from tests.toys import PROMPT, SETTINGS, table

COSTS = Costs({1: 1.0, 2: 1.1, 5: 1.4})
SINGLE_PRECISION_INSIDE = {"GPTJ", "Gemma2"}  # of the attention, where a token's own key lies in another column here


def run(
    target: TableModel,
    drafter: Drafter,
    settings: SamplingSettings,
    length: DraftLength,
    alternatives: int | None,
    seed: int = 3,
) -> tuple[list[list[int]], list[Round]]:
    samples = SAMPLES // 2 if settings.needs_context else SAMPLES
    requests = [Request(PROMPT, LENGTH, RandomStream(seed, i)) for i in range(samples)]
    tokens, rounds = decode(target, requests, settings, drafter, length, alternatives=alternatives)
    return tokens, [record for row in rounds for record in row]


@pytest.mark.parametrize(
    ("name", "count"),
    [("temperature 1", 1), *((name, 2) for name in ("greedy", "temperature 1", "top-k", "bias", "penalties", "all"))],
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
        ModelDrafter(table(2, V), SamplingSettings(temperature=0.5, top_k=2), 0.3),
        ChoiceDrafter([ModelDrafter(table(2, V), step_seconds=0.3), PromptLookupDrafter()]),
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
    monkeypatch.setattr(round_module, "_go_on", _with_a_used_number(round_module._go_on))
    tokens, _ = run(target, ModelDrafter(table(2, V)), SETTINGS["temperature 1"], FixedLength(2), 2)
    assert p_value(tokens, target, SETTINGS["temperature 1"]) < ALARM


def _with_a_used_number(go_on: Any) -> Any:
    class Used:
        def __init__(self, token: int) -> None:
            self.token = token

        def take(self, count: int) -> list[float]:
            return [(self.token + 0.5) / V] * count

    def wrong(scorer: Any, row: DraftRow, outcome: Any, *rest: Any) -> Any:
        stream, row.stream = row.stream, Used(outcome.tokens[-1])  # type: ignore[assignment]
        try:
            return go_on(scorer, row, outcome, *rest)
        finally:
            row.stream = stream

    return wrong


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


# Engines.


@pytest.mark.parametrize("architecture", CONFIGS)
def test_alternatives_get_the_logits_that_they_would_have_in_their_places(architecture: str) -> None:
    model = tiny(architecture)
    assert scores_alternatives(model)
    close = 1e-4 if architecture in SINGLE_PRECISION_INSIDE else 1e-9
    compare(model, close)


@pytest.mark.parametrize("architecture", ["Llama", "Gemma3", "GPT2"])
def test_recorded_passes_and_padded_widths_score_them_as_well(architecture: str) -> None:
    model = TransformersModel(module(architecture, seed=1))
    record_now(model)
    assert model.recorded is not None
    compare(model, 1e-9)
    model.pad_widths(lambda n, context: n + 3)
    compare(model, 1e-9)


def compare(model: TransformersModel, close: float) -> None:
    """Two rows of different length, one opened after a third that is closed again, so that slots are out of order."""
    rows = [some_tokens(30, 1), some_tokens(23, 2)]
    lengths, others, places = [4, 3], [[9, 8, 7], [6, 5]], [[0, 2, 3], [1, 1]]
    third, second, first = model.open(), model.open(), model.open()
    third.close()  # its slot goes to the first row: not in order any more
    sequences = [first, second] if first.slot > second.slot else [second, first]
    try:
        before = [len(row) - count for row, count in zip(rows, lengths, strict=True)]
        model.score(sequences, *pad_rows([row[:n] for row, n in zip(rows, before, strict=True)], model.device), "none")
        new, counts = pad_rows([row[n:] for row, n in zip(rows, before, strict=True)], model.device)
        out = model.score_beside(sequences, new, counts, pad_rows(others, model.device)[0], places).clone()
        for i, row in enumerate(rows):
            plain = reference(model, row)
            assert torch.allclose(out[i, : lengths[i]], plain[before[i] :], atol=close)
            for m, (token, place) in enumerate(zip(others[i], places[i], strict=True)):
                there = [*row[: before[i] + place], token]
                assert torch.allclose(out[i, lengths[i] + m], reference(model, there)[-1], atol=close)
        for i, m in ((0, 1), (1, 0)):
            model.take_alternative(sequences[i], before[i] + places[i][m], m)
            assert sequences[i].length == before[i] + places[i][m] + 1
        more, counts = pad_rows([[11, 12], [13]], model.device)
        after = model.score(sequences, more, counts)
        assert after is not None
        for i, m in ((0, 1), (1, 0)):
            whole = [*rows[i][: before[i] + places[i][m]], others[i][m], *more[i, : counts[i]].tolist()]
            assert torch.allclose(after[i, : counts[i]], reference(model, whole)[-counts[i] :], atol=close)
    finally:
        for sequence in sequences:
            sequence.close()


@pytest.mark.parametrize("layers", [(), (1,)])
def test_kept_states_follow_the_alternative(layers: tuple[int, ...]) -> None:
    model = TransformersModel(module("Llama", seed=2))
    model.keep_states(layers)
    row, plain = model.open(), model.open()
    tokens = torch.tensor([some_tokens(12, 3)])
    model.score([row], tokens[:, :8], [8], "none")
    model.score_beside([row], tokens[:, 8:], [4], torch.tensor([[5, 6]]), [[1, 2]])
    model.take_alternative(row, 10, 1)
    model.score([plain], torch.cat([tokens[:, :10], torch.tensor([[6]])], 1), [11], "none")
    assert torch.allclose(model.states(row, 0, 11, layers), model.states(plain, 0, 11, layers), atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_of_a_model_are_its_own(temperature: float) -> None:
    """Greedy: the very tokens of plain decoding. Sampled: by the target's law along the text, every token is possible."""
    target, draft = tiny("Llama"), tiny("Llama", seed=5)
    prompt = some_tokens(9, 4)
    drafters: list[Drafter] = [ModelDrafter(draft), EarlyExitDrafter(1), ModelDrafter(target)]
    sampling = SamplingSettings(temperature=temperature, top_k=3 if temperature else 0)
    plain = decode(target, [Request(prompt, 60, RandomStream(1))], sampling)[0][0]
    for drafter in drafters:
        request = Request(prompt, 60, RandomStream(1))
        (tokens,), (rounds,) = decode(target, [request], sampling, drafter, FixedLength(2), alternatives=8)
        if temperature == 0.0:
            assert tokens == plain
            continue
        whole = reference(target, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert all(token in law.topk(3).indices for token, law in zip(tokens, whole, strict=True))
        if drafter is not drafters[2]:
            assert sum(record.taken for record in rounds) > 2


def test_misuse_is_refused_in_one_line() -> None:
    model = tiny("Llama")
    row = model.open()
    new, others = torch.tensor([[1, 2]]), torch.tensor([[3]])
    try:
        with pytest.raises(ParameterError, match=r"places must be in 0 … 1, those of appended tokens, got 2"):
            model.score_beside([row], new, [2], others, [[2]])
        with pytest.raises(ParameterError, match=r"places must be at most 1 a row"):
            model.score_beside([row], new, [2], others, [[0, 1]])
        model.score_beside([row], new, [2], others, [[1]])
        with pytest.raises(ParameterError, match=r"alternative must be one of the 1"):
            model.take_alternative(row, 1, 1)
        with pytest.raises(ParameterError, match=r"position must be in 0 … 1"):
            model.take_alternative(row, 2, 0)
        model.score([row], new, [2], "none")
        with pytest.raises(ParameterError, match=r"alternative must be one of the 0"):
            model.take_alternative(row, 1, 0)
    finally:
        row.close()


def test_who_can_score_none_is_not_given_any() -> None:
    other = tiny_encoder_decoder("T5")
    assert not scores_alternatives(other)
    drafter = ModelDrafter(table(2, V))
    assert check_alternatives(None, other, drafter) == 0
    assert check_alternatives(0, other, drafter) == 0
    assert check_alternatives(None, table(1, V), drafter) is None
    assert check_alternatives(None, table(1, V), ChoiceDrafter([PromptLookupDrafter(), drafter])) is None
    assert check_alternatives(None, table(1, V), PromptLookupDrafter()) == 0
    with pytest.raises(ParameterError, match=r"alternatives must be 0 for .*, got 2: decoder-only models"):
        check_alternatives(2, other, drafter)
    with pytest.raises(ParameterError, match=r"alternatives must be a whole number in 0 … 16, got 17"):
        check_alternatives(17, table(1, V), drafter)
    with pytest.raises(ParameterError, match=r"alternatives must be 0 with prompt-lookup, got 2: they are what a model"):
        check_alternatives(2, table(1, V), PromptLookupDrafter())
    with pytest.raises(ParameterError, match=r"alternatives must be 0 without a draft, got 1"):
        check_alternatives(1, table(1, V), None)


def test_a_model_that_reads_masks_in_its_own_way_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformersModel(module("Llama", seed=3))
    arguments = model.pass_arguments

    def blind(tokens: Tensor, positions: Tensor, longest: int, cache: Any, source: Any, at: Tensor | None = None) -> Any:
        del at
        return arguments(tokens, positions, longest, cache, source)

    monkeypatch.setattr(model, "pass_arguments", blind)
    assert not model.scores_alternatives


# Which ones.


def test_the_likeliest_other_tokens_are_found() -> None:
    law = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01]).log()
    assert [token for token, _ in Shares(law).others(0)] == [1, 2, 3, 4]
    assert [token for token, _ in Shares(law).others(2)] == [0, 1, 3, 4]
    assert [token for token, _ in Shares(law).others(2, 2)] == [0, 1]
    assert Shares(law).others(2, 1)[0][1] == pytest.approx(0.5)
    assert [token for token, _ in Shares(law).others(5, 9)] == [0, 1, 2, 3, 4]
    assert Shares(torch.full((4,), -torch.inf)).others(0) == []
    assert Shares(torch.tensor([0.0, -torch.inf])).others(0, 3) == []
    assert [likely_class(p) for p in (LEAST_LIKELY, 0.05, 0.1, 0.2, 0.3, 0.9)] == [0, 1, 2, 3, 4, 5]


def chosen(costs: Costs, others: Sequence[Sequence[float]], signals: Sequence[int]) -> list[list[int]]:
    """What an adaptive length that knows nothing yet would have scored."""
    state = AdaptiveLength(costs).start()
    plan = state.plan([Prospect("d", step_seconds=0.05, gated=True, first=0.6, later=0.6)], 30, 10)
    assert plan.gated
    return plan.choose(signals, others)


def test_alternatives_fill_what_is_free_and_stop_where_they_cost_more_than_they_bring() -> None:
    others = [[0.3, 0.1, 0.05], [0.3, 0.03]]
    free = Costs({1: 1.0, 17: 1.0})
    assert chosen(free, others, [5, 5]) == [[0, 1, 2], [0, 1]]
    dear = Costs({n: float(n) if n > 1 else 1.0 for n in range(1, 18)} | {2: 1.01, 3: 1.02})
    assert chosen(dear, others, [5, 5]) == [[], []]
    some = Costs({n: 1.0 + 0.1 * (n - 1) for n in range(1, 18)})
    assert chosen(some, others, [5, 5]) == [[0], [0]]
    assert chosen(some, others, [0, 0]) == [[0], []]  # the second place is seldom reached


def test_alternatives_that_are_never_right_are_given_up() -> None:
    costs = Costs({n: 1.0 + 0.03 * (n - 1) for n in range(1, 18)})
    state = AdaptiveLength(costs).start()
    about = Prospect("d", step_seconds=0.05, gated=True, first=0.6, later=0.6)
    counts = []
    for _ in range(60):
        plan = state.plan([about], 30, 10)
        if not plan.gated:
            continue
        (places,) = plan.choose([3], [[0.12, 0.1]])
        counts.append(len(places))
        others = [(likely_class(0.1), False)] * len(places)
        state.update(Trial(about, 1, 1, 1, (3,), others, len(places)))
    assert counts[0] == 2
    assert counts[-1] == 0


def test_an_expert_draft_needs_fewer_rounds_with_alternatives() -> None:
    """The point of it: with the same draft, the same seed's texts take fewer passes."""
    target, draft = table(1, 8, sharpness=1.0), table(1, 8, sharpness=0.6)
    sampling = SamplingSettings(temperature=1.0)

    def rounds(count: int) -> int:
        requests = [Request(PROMPT, 200, RandomStream(2, i)) for i in range(4)]
        made = decode(target, requests, sampling, ModelDrafter(draft), FixedLength(2), alternatives=count)[1]
        return sum(map(len, made))

    assert rounds(3) < 0.95 * rounds(0)


class OfMoreTokens(ModelDrafter):
    """Takes for granted that the tokens mean the same, where tokenizers would tell."""

    def bind(self, target: LanguageModel) -> None:
        del target


def test_the_vocabulary_bounds_them() -> None:
    """A draft with more entries than the target proposes none of the surplus ones."""
    target, draft = tiny("Llama"), TransformersModel(module("Llama", seed=1, vocab_size=VOCABULARY + 3))
    (tokens,), (rounds,) = decode(
        target,
        [Request(some_tokens(5, 1), 30, RandomStream(1))],
        SamplingSettings(temperature=1.0),
        OfMoreTokens(draft),
        FixedLength(2),
        alternatives=16,
    )
    assert max(tokens) < VOCABULARY
    assert all(record.alternatives == 16 * record.drafted for record in rounds if record.drafted)


# What the reader with fresh eyes found.


def test_a_plan_never_has_more_scored_than_cost_tables_know() -> None:
    state = AdaptiveLength(Costs({1: 1.0, 17: 1.0, 64: 1.0}), longest=40).start()
    about = Prospect("d", step_seconds=1e-4, gated=True, first=0.99, later=0.99)
    plan = state.plan([about], 40, 10)
    for drafted in (3, 15, 16, 17, 25):
        count = sum(map(len, plan.choose([7] * drafted, [[0.3, 0.2, 0.1]] * drafted)))
        assert count == (min(3 * drafted, 16 - drafted) if drafted < 16 else 0)


def test_alternatives_lose_no_more_than_drafts_may() -> None:
    """Every draft is rejected, and what was hoped for beside it never comes."""
    costs = Costs({n: 1.0 + 0.1 * (n - 1) for n in range(1, 18)})
    policy = AdaptiveLength(costs)
    state = policy.start()
    about = Prospect("d", step_seconds=0.02, gated=True, first=0.6, later=0.6)
    lost, passes = 0.0, 0
    for _ in range(300):
        plan = state.plan([about], 30, 10)
        drafted = min(1, plan.limit)
        count = sum(map(len, plan.choose([3] * drafted, [[0.9] * 8] * drafted))) if plan.gated else 0
        lost += costs.verify(1 + drafted + count) - costs.verify(1) + 0.02 * drafted
        passes += 1
        learned = [(likely_class(0.9), False)] * 8 if plan.gated else []
        signals = (3,) * drafted if plan.gated else ()
        state.update(Trial(about if drafted else None, drafted, drafted, 0, signals, learned, count))
    assert lost < policy.loss_passes + (policy.loss_share + policy.probe_share) * passes


def test_what_comes_is_learned_from_candidates_that_were_not_scored() -> None:
    """A class that was given up comes back once it pays."""
    costs = Costs({n: 1.0 + 0.06 * (n - 1) for n in range(1, 18)})
    state = AdaptiveLength(costs).start()
    about = Prospect("d", step_seconds=0.02, gated=True, first=0.6, later=0.6)
    counts: list[int] = []

    def rounds(right: bool) -> None:
        for i in range(60):
            plan = state.plan([about], 30, 10)
            if plan.gated:
                (places,) = plan.choose([3], [[0.2]])
                counts.append(len(places))
                accepted = i % 2
                came = right and not accepted
                taken = came and bool(places)
                state.update(Trial(about, 1, 1, accepted, (3,), [(likely_class(0.2), came)], len(places), taken))
            else:
                state.update(Trial())

    rounds(False)
    assert counts[-1] == 0
    rounds(True)
    assert counts[-1] == 1


def test_an_oracle_counts_the_tokens_of_alternatives() -> None:
    costs = Costs({1: 1.0, 2: 1.9, 17: 1.95})
    rounds = [Round((1, 2), 1, 0, "d", seconds={}, alternatives=2, taken=True)] * 10
    assert oracle_seconds(rounds, costs, DraftSeconds(), 5) == pytest.approx(19.0)
    assert predicted_seconds(rounds[:1], costs, {}, 5) == pytest.approx(costs.verify(4))


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
