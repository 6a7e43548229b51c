"""Texts that are decided by position: plain decoding's to the token, whatever drafts; and plain decoding's have the law.

Together these are the law for every drafter. False-alarm rate: each statistical test rejects at p < 1e-6; the seeds are
fixed, so a pass stays a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from outrider.acceptance.by_position import verify_by_position
from outrider.acceptance.verify import Verdict
from outrider.costs import Costs
from outrider.decode import Decoder, Request, decode
from outrider.draft_length import AdaptiveLength, FixedLength, Plan
from outrider.drafters import Drafter, ModelDrafter, PromptLookupDrafter, RandomDrafter, SpeculativeDrafter
from outrider.drafters.base import DraftContext
from outrider.errors import ParameterError
from outrider.models.table import TableModel
from outrider.proposal import DraftRow, Proposal, padded_proposal
from outrider.randomness import RandomStream, stream_after
from outrider.round import Extras, several
from outrider.sampling import SamplingSettings, race
from outrider.theory import race_acceptance_probability
from tests.helpers.encoder_decoder import some_source
from tests.helpers.every_drafter import DRAFTERS, LENGTHS
from tests.helpers.heads import small_target
from tests.helpers.marks import thinned
from tests.helpers.positions import stream_by_position
from tests.helpers.samples import ALARM, LENGTH, SAMPLES, V, p_value
from tests.helpers.tiny_models import tiny, tiny_encoder_decoder
from tests.helpers.toys import PROMPT, SETTINGS, table

DTYPES = {"kernels": torch.float32, "torch": torch.float64}
SAMPLED = [name for name in SETTINGS if name != "greedy"]


def texts(
    target: TableModel,
    drafter: Drafter | None,
    settings: SamplingSettings,
    length: Any = None,
    rows: int = 24,
    new_tokens: int = 24,
    extras: Extras | None = None,
) -> list[list[int]]:
    requests = [Request(PROMPT, new_tokens, stream_by_position(3, i)) for i in range(rows)]
    return decode(target, requests, settings, drafter, length or FixedLength(3), extras)[0]


@cache
def plain_texts(setting: str, by: str) -> list[list[int]]:
    return texts(table(1, V, dtype=DTYPES[by]), None, SETTINGS[setting])


@pytest.mark.parametrize(("name", "by"), thinned(SAMPLED, DTYPES))
def test_plain_decoding_follows_the_law(name: str, by: str) -> None:
    target = table(1, V, dtype=DTYPES[by])
    found = texts(target, None, SETTINGS[name], rows=SAMPLES, new_tokens=LENGTH)
    assert p_value(found, target, SETTINGS[name]) > ALARM


@pytest.mark.parametrize(
    ("name", "length", "setting", "by"), thinned(DRAFTERS, LENGTHS, ["temperature 1", "all"], DTYPES, every=4)
)
def test_every_drafter_gives_plain_decodings_text(name: str, length: str, setting: str, by: str) -> None:
    target, settings, plain = table(1, V, dtype=DTYPES[by]), SETTINGS[setting], plain_texts(setting, by)
    assert texts(target, DRAFTERS[name](), settings, LENGTHS[length]) == plain
    assert len(set(map(tuple, plain))) == len(plain)


@pytest.mark.parametrize("reported", [Extras(betas=True), Extras(logprobs=True), Extras(drafts=True)])
def test_what_is_reported_changes_nothing(reported: Extras) -> None:
    target, draft = table(1, V, dtype=torch.float32), table(2, V, dtype=torch.float32)
    wanted = texts(target, None, SETTINGS["temperature 1"])
    assert texts(target, ModelDrafter(draft), SETTINGS["temperature 1"], extras=reported) == wanted


class Liar(ModelDrafter):
    """Says that it drew from another law than it did."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        assert proposal.probs is not None
        return replace(proposal, probs=proposal.probs.flip(-1))


class Peeker(RandomDrafter):
    """Knows the target's law and the numbers, and drafts what will be drawn up to the first 0, which it withholds."""

    def propose(self, rows: Any, plans: Any, context: DraftContext) -> Proposal:
        target = context.target
        assert isinstance(target, TableModel)
        drafts = []
        for row, plan in zip(rows, plans, strict=True):
            drafts.append(self._of(row, plan, target))
        return padded_proposal(drafts, context.device, [[] for _ in rows])

    def _of(self, row: DraftRow, plan: Plan, target: TableModel) -> list[int]:
        assert row.stream.key is not None
        known: list[int] = []
        for _ in range(plan.limit):
            law = target.probs_after([*row.tokens, *known]).unsqueeze(0)
            (drawn,) = race(law, [row.stream.key], [len(row.tokens) + len(known)]).tolist()
            if drawn == 0:
                break
            known.append(drawn)
        return known


@pytest.mark.parametrize("make", [lambda: Liar(table(2, V)), Peeker], ids=["liar", "peeker"])
def test_no_drafter_can_bend_it(make: Callable[[], Drafter]) -> None:
    """By the ratio rule a drafter must not know the numbers that accept it, nor say what is not so."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    assert texts(target, make(), settings) == texts(target, None, settings)


def test_a_draft_that_is_the_target_is_always_right() -> None:
    target = table(1, V)
    requests = [Request(PROMPT, 30, stream_by_position(3, i)) for i in range(20)]
    _, rounds = decode(target, requests, SETTINGS["temperature 1"], ModelDrafter(target), FixedLength(3))
    assert all(one.accepted == one.drafted for row in rounds for one in row)


def test_acceptance_is_what_theory_says() -> None:
    """Reported betas are the rule's, and as many are accepted."""
    target, draft = table(1, V), table(2, V)
    requests = [Request(PROMPT, 200, stream_by_position(3, i)) for i in range(40)]
    _, rounds = decode(target, requests, SETTINGS["temperature 1"], ModelDrafter(draft), FixedLength(1), Extras(betas=True))
    every = [one for row in rounds for one in row if one.drafted]
    betas = torch.tensor([one.betas[0] for one in every if one.betas])
    accepted = torch.tensor([float(one.accepted) for one in every])
    assert len(betas) == len(every) > 4000
    error = float((betas * (1 - betas)).sum().sqrt()) / len(every)
    assert abs(float(accepted.mean() - betas.mean())) < 5 * error
    laws = [model.probs_after([*PROMPT]) for model in (target, draft)]
    assert every[0].betas == pytest.approx([float(race_acceptance_probability(laws[0], laws[1]))])


@pytest.mark.parametrize("name", sorted(DRAFTERS.keys() - {"suffix with a memory"}))
def test_betas_of_every_drafter_are_how_often_it_is_right(name: str) -> None:
    """Each draws by the numbers of the places, or is certain of tokens that it has not seen."""
    requests = [Request(PROMPT, 50, stream_by_position(4, i)) for i in range(24)]
    drafter, extras = DRAFTERS[name](), Extras(betas=True)
    _, rounds = decode(table(1, V), requests, SETTINGS["temperature 1"], drafter, FixedLength(2), extras)
    tested = [beta for row in rounds for one in row for beta in (one.betas or ())[: one.tested]]
    accepted = sum(one.accepted for row in rounds for one in row)
    deviation = sum(beta * (1 - beta) for beta in tested) ** 0.5
    assert abs(accepted - sum(tested)) < 5 * deviation + 1e-3


@pytest.mark.parametrize("name", ["model", "speculative"])
def test_a_draft_that_reads_the_source_as_text_draws_by_the_places_of_the_text(name: str) -> None:
    target, draft = tiny_encoder_decoder("T5"), tiny("Llama", 1)
    make = ModelDrafter(draft, step_seconds=0.2)
    drafter = make if name == "model" else SpeculativeDrafter(draft, PromptLookupDrafter(), FixedLength(2), step_seconds=0.2)
    source = some_source(target, 3, 8)
    requests = [Request([1], 24, stream_by_position(4, i), source=source) for i in range(24)]
    settings, extras = SETTINGS["temperature 1"], Extras(betas=True)
    _, rounds = decode(target, requests, settings, drafter, FixedLength(3), extras)
    tested = [beta for row in rounds for one in row for beta in (one.betas or ())[: one.tested]]
    deviation = sum(beta * (1 - beta) for beta in tested) ** 0.5
    assert sum(tested) > 20
    assert abs(sum(one.accepted for row in rounds for one in row) - sum(tested)) < 4 * deviation


def test_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that keeps the draft wherever it is likely gives other texts."""
    original = verify_by_position

    def lenient(probs: Any, tokens: Any, *rest: Any) -> Verdict:
        verdict = original(probs, tokens, *rest)
        if tokens.shape[1] == 0:
            return verdict
        likely = probs[:, 0].gather(-1, tokens[:, :1]).squeeze(-1) > 0.3
        return replace(verdict, num_accepted=torch.where(likely, verdict.num_accepted.clamp(min=1), verdict.num_accepted))

    monkeypatch.setattr(several, "verify_by_position", lenient)
    target, settings = table(1, V), SETTINGS["temperature 1"]
    assert texts(target, ModelDrafter(table(2, V)), settings) != texts(target, None, settings)


def test_rows_do_not_depend_on_their_company() -> None:
    target, settings = table(1, V), SETTINGS["all"]
    together = texts(target, DRAFTERS["choice"](), settings, rows=6)
    for i, text in enumerate(together):
        request = Request(PROMPT, 24, stream_by_position(3, i))
        assert decode(target, [request], settings, None)[0] == [text]


def test_a_text_goes_on_as_it_would_have() -> None:
    """Positions count from the beginning of the prompt: with the key of the whole, its rest is the same again."""
    target, settings = table(1, V), SETTINGS["temperature 1"]
    (whole,) = texts(target, None, settings, rows=1)
    request = Request([*PROMPT, *whole[:10]], 14, stream_by_position(3, 0))
    assert decode(target, [request], settings, ModelDrafter(table(2, V)), FixedLength(3))[0] == [whole[10:]]


def test_what_a_drafter_knows_is_no_part_of_the_key() -> None:
    assert stream_after(1, 0, [5], None, [7], True).key == stream_after(1, 0, [5], None, (), True).key
    assert stream_after(1, 0, [5], by_position=True).key != stream_after(1, 0, [6], by_position=True).key
    assert stream_after(1, 0, [5], by_position=True).key != stream_after(1, 1, [5], by_position=True).key
    assert stream_after(1, 0, [5]).key is None


def test_both_kinds_of_rows_are_refused_in_one_batch() -> None:
    requests = [Request(PROMPT, 4, RandomStream(0)), Request(PROMPT, 4, stream_by_position(0))]
    with pytest.raises(ParameterError, match="all be decided by position or none"):
        decode(table(1, V), requests, SETTINGS["temperature 1"])
    for first, later in (requests, requests[::-1]):
        decoder = Decoder(table(1, V), (), SETTINGS["temperature 1"])
        decoder.admit([first])
        with pytest.raises(ParameterError, match="all be decided by position or none"):
            decoder.admit([later])
        while decoder.step():  # it goes on as if nobody had asked
            pass
        decoder.admit([later])  # after the others' end
        assert decoder.step()
        decoder.close()


@pytest.mark.parametrize("setting", ["greedy", "temperature 1"])
def test_nothing_is_accepted_leniently(setting: str) -> None:
    decoder = Decoder(table(1, V), [Request(PROMPT, 4, stream_by_position(0))], SETTINGS[setting], lenience=0.5)
    with pytest.raises(ParameterError, match=r"lenience must be 1 where tokens are drawn by position, got 0\.5"):
        next(decoder.rounds())


def test_alternatives_are_not_scored() -> None:
    """Their keys lie in other columns, and sums are added up in another order."""
    target, draft, settings = small_target(), small_target(), SETTINGS["temperature 1"]
    ask = Request([1, 2], 4, stream_by_position(0))
    with pytest.raises(ParameterError, match="alternatives must be 0 where tokens are drawn by position, got 2"):
        decode(target, [ask], settings, ModelDrafter(draft), FixedLength(1), alternatives=2)
    for stream, scored in ((stream_by_position(0), False), (RandomStream(0), True)):
        request, length = Request([1, 2], 40, stream), AdaptiveLength(Costs({1: 1.0, 17: 1.0}))
        _, (rounds,) = decode(target, [request], settings, ModelDrafter(draft, step_seconds=0.01), length)
        assert any(one.alternatives for one in rounds) is scored
