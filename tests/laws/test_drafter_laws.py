"""Every drafter follows the target's law: chi-square of whole continuations with the real random numbers, on toy models.

False-alarm rate as in test_end_to_end_law: each test rejects at p < 1e-6; the seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from outrider.costs import Costs
from outrider.decode import Request, decode
from outrider.draft_length import AdaptiveLength, FixedLength
from outrider.drafters import (
    ChoiceDrafter,
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    RandomDrafter,
    SpeculativeDrafter,
    SuffixDrafter,
)
from outrider.models.table import TableModel
from outrider.proposal import Proposal
from outrider.randomness import RandomStream
from outrider.round import Extras
from outrider.sampling import SamplingSettings
from tests.helpers.every_drafter import DRAFTERS, LENGTHS, holed
from tests.helpers.marks import slow, thinned
from tests.helpers.samples import ALARM, FAULTY, SAMPLES, V, p_value, run, samples_of
from tests.helpers.toys import PROMPT, SETTINGS, one_behind, table


@pytest.mark.parametrize(
    ("name", "length", "setting"),
    [*thinned(DRAFTERS, LENGTHS, ["temperature 1", "all"]), *(slow(*each, "greedy") for each in product(DRAFTERS, LENGTHS))],
)
def test_every_drafter_follows_the_targets_law(name: str, length: str, setting: str) -> None:
    target = table(1, V)
    samples = min(samples_of(SETTINGS[setting]), SAMPLES // 3)
    tokens, rounds = run(target, DRAFTERS[name](), SETTINGS[setting], LENGTHS[length], samples=samples)
    assert p_value(tokens, target, SETTINGS[setting]) > ALARM
    if length == "fixed":
        assert sum(record.drafted for record in rounds) > samples / 5


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "suffix with a memory"])  # batches refuse it
def test_a_rows_samples_do_not_depend_on_its_neighbours(name: str, length: str) -> None:
    """Rows of a batch draft in step, at every depth, but each takes its own numbers."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    prompts = [[0, 1], [2], [1, 0, 2, 1, 0]]
    requests = [[Request(p, n, RandomStream(6, i)) for i, (p, n) in enumerate(zip(prompts, (30, 9, 20), strict=True))]]
    requests.append([Request(p, n, RandomStream(6, i)) for i, (p, n) in enumerate(zip(prompts, (30, 9, 20), strict=True))])
    batch, _ = decode(target, requests[0], settings, DRAFTERS[name](), LENGTHS[length])
    for i, request in enumerate(requests[1]):
        assert decode(target, [request], settings, DRAFTERS[name](), LENGTHS[length])[0][0] == batch[i]


def test_the_record_names_who_drafted() -> None:
    target = table(1, V)
    drafter = DRAFTERS["choice"]()
    _, rounds = run(target, drafter, SETTINGS["temperature 1"], LENGTHS["adaptive"], new_tokens=30, samples=200)
    names = {record.drafter for record in rounds}
    assert names >= {None, "table-2", "prompt-lookup"}
    assert all((record.drafter is None) == (record.drafted == 0) for record in rounds)


@pytest.mark.parametrize("name", ["speculative, depth 2", "speculative, depth 3"])
def test_acceptance_of_a_speculative_draft_is_that_of_its_model(name: str) -> None:
    """Acceleration inside changes when tokens come, not their law: accepted / tested is that of the model on its own."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    accelerated = DRAFTERS[name]()
    assert isinstance(accelerated, SpeculativeDrafter)
    rates = []
    for drafter in (accelerated, ModelDrafter(accelerated.model)):
        requests = [Request(PROMPT, 24, RandomStream(4, i)) for i in range(400)]
        _, rounds = decode(target, requests, settings, drafter, FixedLength(3))
        records = [record for row in rounds for record in row]
        rates.append((sum(r.accepted for r in records), sum(r.tested for r in records)))
    (a, n), (b, m) = rates
    pooled = (a + b) / (n + m)
    assert abs(a / n - b / m) < 5 * (pooled * (1 - pooled) * (1 / n + 1 / m)) ** 0.5
    assert 0.2 < pooled < 0.95


class Hasty(SpeculativeDrafter):
    """A planted bug: hands on an inner round's tokens with the law of the position before."""

    def propose(self, *args: Any) -> Proposal:
        return one_behind(super().propose(*args))


def test_a_speculative_draft_with_the_wrong_laws_is_rejected() -> None:
    target, settings = table(1, V), SETTINGS["temperature 1"]
    wrong = Hasty(table(2, V), ModelDrafter(table(3, V)), FixedLength(2), step_seconds=0.2)
    tokens, _ = run(target, wrong, settings, FixedLength(3), samples=FAULTY)
    assert p_value(tokens, target, settings) < ALARM


@pytest.mark.parametrize("setting", [SamplingSettings(), SamplingSettings(temperature=1.0)], ids=["greedy", "temperature 1"])
def test_a_useless_draft_at_linear_costs_is_dropped(setting: SamplingSettings) -> None:
    """llama.cpp-like costs, a draft that knows nothing: what is spent on it stays under 3 % of plain decoding."""
    target = TableModel(torch.eye(8, dtype=torch.float64).roll(1, 1) * 0.93 + 0.01)
    costs = Costs({1: 1.0, 17: 17.0})
    useless = ModelDrafter(TableModel(torch.eye(8, dtype=torch.float64).roll(3, 1) * 0.93 + 0.01), step_seconds=0.5)
    requests = [Request([0, 1], 400, RandomStream(0, i)) for i in range(10)]
    _, rounds = decode(target, requests, setting, useless, AdaptiveLength(costs))
    records = [record for row in rounds for record in row]
    seconds = sum(costs.verify(r.drafted + 1) + 0.5 * r.drafted for r in records)
    tokens = sum(len(r.tokens) for r in records)
    assert tokens == 10 * 400
    assert seconds < 1.031 * tokens * costs.verify(1)  # the last try of a row ends where it ends
    assert any(r.drafted for r in records)  # it does try


def test_a_draft_that_becomes_good_is_taken_up_again() -> None:
    """The rate is learned while it is bad; probing must notice the change within the text."""

    class Turning(RandomDrafter):
        def propose(self, rows, plans, context):  # type: ignore[no-untyped-def]
            from outrider.proposal import Proposal
            from outrider.support.device_data import pad_rows

            drafts = [[(3 if len(r.tokens) > 300 else 5)] * p.limit for r, p in zip(rows, plans, strict=True)]
            tokens, lengths = pad_rows(drafts, context.device)
            return Proposal(tokens, lengths)

    always = TableModel(torch.eye(8, dtype=torch.float64)[3])
    policy = AdaptiveLength(Costs({1: 1.0, 2: 1.05, 17: 1.5}))
    _, rounds = decode(always, [Request([0], 900, RandomStream(0))], SamplingSettings(), Turning(), policy)
    early = [r for r in rounds[0] if not r.accepted]
    assert 0 < sum(r.drafted for r in early) * 0.05 < 0.03 * 300
    assert sum(len(r.tokens) for r in rounds[0][-20:]) > 20 * 8
    assert len(rounds[0]) < 500


@pytest.mark.parametrize("vocabulary", [3, 9])
@pytest.mark.parametrize("copying", [PromptLookupDrafter, SuffixDrafter])
def test_copies_inside_a_choice_inside_a_draft_forget_what_is_taken_back(
    vocabulary: int, copying: Callable[[], Drafter]
) -> None:
    """Long enough for stale positions to matter: greedy output is plain decoding's, and copies hold certain text only."""
    target = table(1, vocabulary)
    choice = ChoiceDrafter([copying(), RandomDrafter()])
    drafter = SpeculativeDrafter(table(2, vocabulary), choice, FixedLength(2), step_seconds=0.2)
    accepted = 0
    for settings in (SamplingSettings(), SETTINGS["temperature 1"]):
        request = Request([0, 1], 80, RandomStream(3))
        tokens, rounds = decode(target, [request], settings, drafter, FixedLength(5))
        assert len(tokens[0]) == 80
        accepted += sum(r.accepted for r in rounds[0])
        if settings.greedy:
            assert tokens == decode(target, [Request([0, 1], 80, RandomStream(3))], settings)[0]
    assert accepted


def test_a_draft_without_a_law_ends_the_draft_and_not_the_generation() -> None:
    """A padding entry of the target is all that a processor allows: the draft models have no law for it."""
    target, small = table(1, 6), TableModel(table(2, 4)._probs, name="small")

    class Same(ModelDrafter):
        def bind(self, target: object) -> None:
            """Their tokenizers would agree."""

    class SameSpeculative(SpeculativeDrafter):
        def bind(self, target: object) -> None:
            """Their tokenizers would agree."""

    settings = SamplingSettings(logit_bias=dict.fromkeys(range(4), -float("inf")))
    plain = decode(target, [Request([0, 5], 12, RandomStream(0))], settings)[0]
    for drafter in (Same(small), SameSpeculative(small, Same(small), FixedLength(2), step_seconds=0.1)):
        assert decode(target, [Request([0, 5], 12, RandomStream(0))], settings, drafter, FixedLength(3))[0] == plain


def test_signals_are_learned_by_the_rows_that_asked_only() -> None:
    """Rows that were not asked would learn from their neighbours' rounds: their samples would depend on them."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    policy = AdaptiveLength(Costs({1: 1.0, 2: 1.3, 5: 1.6}), longest=4, probe_share=0.2)
    for seed in range(4):
        batch, _ = decode(
            target,
            [Request([0, i % V], 40, RandomStream(seed, i)) for i in range(6)],
            settings,
            ModelDrafter(table(2, V), step_seconds=0.2),
            policy,
        )
        for i in range(6):
            drafter = ModelDrafter(table(2, V), step_seconds=0.2)
            alone = decode(target, [Request([0, i % V], 40, RandomStream(seed, i))], settings, drafter, policy)[0][0]
            assert alone == batch[i]


@pytest.mark.parametrize("copying", [PromptLookupDrafter, SuffixDrafter])
def test_a_copy_that_becomes_good_is_taken_up_without_a_probe(copying: Callable[[], Drafter]) -> None:
    """Costs as llama.cpp's: wrong copies are not offered in vain for long, and it is noticed when they turn right."""
    turn = TableModel(torch.eye(64, dtype=torch.float64).roll(1, 1))  # counts up, over and over
    noise = torch.randint(0, 64, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    policy = AdaptiveLength(Costs({1: 1.0, 2: 1.7, 4: 2.5, 8: 4.0, 17: 8.0}))
    _, rounds = decode(turn, [Request(noise, 400, RandomStream(0))], SamplingSettings(), copying(), policy)
    records = rounds[0]
    seconds = sum(policy.costs.verify(r.drafted + 1) for r in records)
    assert seconds < 0.65 * 400
    assert all(r.drafted for r in records[-10:-1])


@pytest.mark.parametrize("settings", [SamplingSettings(), SamplingSettings(temperature=1.0)], ids=["greedy", "sampling"])
def test_a_draft_ends_where_its_model_has_no_law(settings: SamplingSettings) -> None:
    request = Request(PROMPT, 200, RandomStream(4))
    _, (rounds,) = decode(
        table(1, V), [request], settings, ModelDrafter(holed(), step_seconds=0.3), FixedLength(3), Extras(drafts=True)
    )
    last, left, ended = PROMPT[-1], 200, 0
    for record in rounds:
        drafts = [last, *(record.drafts or ())]
        assert 1 not in drafts[:-1]
        if record.drafted < min(3, left - 1):
            assert drafts[-1] == 1
            ended += 1
        last, left = record.tokens[-1], left - len(record.tokens)
    assert ended
