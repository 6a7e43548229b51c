"""The audit accepts exact samplers and rejects the planted bugs, on toy tables through the real decoder.

False alarms: an exact sampler is called not exact in one audit of 10,000 at most. Seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.acceptance.by_position import verify_by_position
from outrider.acceptance.verify import Verdict
from outrider.audit.planted import FAULTS
from outrider.audit.sampled import DRAWS, Planted, TextAudit
from outrider.audit.sources import text_seed
from outrider.audit.temperature import TemperatureFit
from outrider.audit.text import Text
from outrider.audit.uniformity import Battery
from outrider.audit.verdict import EXACT, MATTERS, NOT_EXACT, UNCLEAR, _sight, judge
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import PromptLookupDrafter
from outrider.proposal import Proposal
from outrider.randomness import RandomStream
from outrider.round import several
from outrider.sampling import SamplingSettings
from outrider.sampling.truncate_device import truncated
from tests.helpers.audit_texts import ONE, PROMPT, V, draft_model, report, target_model, written
from tests.helpers.marks import slow, thinned
from tests.helpers.toys import WRONG_BONUS, WRONG_RULES, plant_rule, table


@pytest.mark.parametrize(
    "sampling",
    [
        ONE,
        slow(SamplingSettings(temperature=0.7)),
        slow(SamplingSettings(temperature=1.0, top_p=0.9)),
        slow(SamplingSettings(temperature=1.0, top_k=20)),
    ],
    ids=["temperature 1", "temperature 0.7", "top-p", "top-k"],
)
def test_an_exact_sampler_passes_and_every_fault_would_have_been_seen(sampling: SamplingSettings) -> None:
    found = report(written(target_model(), draft_model(), sampling, 70), target_model(), draft_model(), sampling)
    assert found.verdict == EXACT, found.reason
    assert found.exit_code == 0
    assert all(sight.seen or sight.fault in found.reason for sight in found.sights)
    assert all(sight.seen for sight in found.sights if sight.changed >= MATTERS)
    assert sum(sight.seen for sight in found.sights) >= 7
    assert {*FAULTS} <= {sight.fault for sight in found.sights}
    assert found.impossible == ()


@pytest.mark.parametrize("known", [True, slow(False)], ids=["rounds known", "rounds unknown"])
@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_are_rejected(name: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_rule(monkeypatch, name)
    texts = written(target_model(), draft_model(), ONE, 40 if known else 80, known=known)
    found = report(texts, target_model(), draft_model(), ONE)
    assert found.recommended is not None
    assert found.verdict == NOT_EXACT
    assert found.p is not None
    assert found.p < 1e-4
    assert found.exit_code == 1


@pytest.mark.parametrize("name", thinned(WRONG_BONUS))
def test_wrong_bonus_tokens_are_rejected_though_they_are_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the tokens or less. The order of that very fault shows it, and that it could have is said."""
    drafts = draft_model()
    right = report(written(target_model(), drafts, ONE, 30), target_model(), drafts, ONE)
    assert right.verdict != NOT_EXACT, right.reason
    plant_rule(monkeypatch, name)
    texts = written(target_model(), drafts, ONE, 30)
    flags = [flag for text in texts for flag in text.bonus or ()]
    assert 30 <= sum(flags) < 0.25 * len(flags)
    found = report(texts, target_model(), drafts, ONE)
    assert found.verdict == NOT_EXACT
    assert "bonus" in found.reason
    assert next(sight for sight in found.sights if sight.fault == name).seen


def test_texts_by_position_are_exact_and_a_rule_that_keeps_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = draft_model()
    right = report(written(target_model(), drafts, ONE, by_position=True), target_model(), drafts, ONE, by_position=True)
    assert right.verdict == EXACT, right.reason
    assert "no draft had a say, and faults of its rule are not planted" in right.reason
    assert right.alpha is None

    def keeps_all(target: Tensor, tokens: Tensor, *rest: Any) -> Verdict:
        verdict = verify_by_position(target, tokens, *rest)
        return replace(verdict, num_accepted=torch.full_like(verdict.num_accepted, tokens.shape[1]))

    monkeypatch.setattr(several, "verify_by_position", keeps_all)
    wrong = written(target_model(), drafts, ONE, by_position=True)
    assert report(wrong, target_model(), drafts, ONE, by_position=True).verdict == NOT_EXACT


def test_audits_that_share_a_verdict_share_its_false_alarms() -> None:
    audit = TextAudit(target_model(), None, ONE)
    for text in written(target_model(), None, ONE, 12):
        audit.add(text)
    alone, of_fifty = judge(audit, ""), judge(audit, "", audits=50)
    assert of_fifty.tests == 50 * alone.tests == 50 * len(alone.checks)
    assert of_fifty.p == min(1.0, 50 * min(check.p for check in alone.checks) * len(alone.checks))


def test_without_knowing_the_draft_a_wrong_rule_is_seen_and_little_text_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = written(target_model(), draft_model(), ONE, known=False)
    known = report(texts, target_model(), None, ONE)
    assert known.verdict == EXACT, known.reason
    assert "without knowing the draft" in known.reason
    assert report(texts[:9], target_model(), None, ONE).verdict == UNCLEAR
    plant_rule(monkeypatch, "always accept")
    wrong = written(target_model(), draft_model(), ONE, known=False)
    assert report(wrong, target_model(), None, ONE).verdict == NOT_EXACT


class OneNumberForever(RandomStream):
    """A seed set anew in every round."""

    def take(self, count: int) -> list[float]:
        return RandomStream(7).take(count)


def test_a_seed_set_in_the_loop_is_rejected() -> None:
    requests = [Request(PROMPT, 100, OneNumberForever(0)) for _ in range(20)]
    new, rounds = decode(target_model(), requests, ONE, draft_model(), FixedLength(3))
    texts = [Text((*PROMPT, *row), len(PROMPT), tuple(r)) for row, r in zip(new, rounds, strict=True)]
    assert report(texts, target_model(), draft_model(), ONE).verdict == NOT_EXACT


@pytest.mark.slow
def test_a_point_mass_draft_is_audited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = table(1, 12, order=1, sharpness=1.0)
    found = report(written(target, PromptLookupDrafter(), ONE), target, PromptLookupDrafter(), ONE)
    assert found.verdict == EXACT, found.reason
    plant_rule(monkeypatch, "residual = target")
    wrong = report(written(target, PromptLookupDrafter(), ONE), target, PromptLookupDrafter(), ONE)
    assert wrong.verdict == NOT_EXACT


def test_settings_that_an_engine_ignores_are_seen() -> None:
    texts = written(target_model(), None, ONE)
    cold = report(texts, target_model(), None, SamplingSettings(temperature=0.7))
    assert cold.verdict == NOT_EXACT
    truncated = report(texts, target_model(), None, SamplingSettings(temperature=1.0, top_p=0.9))
    assert truncated.verdict == NOT_EXACT
    assert len(truncated.impossible) > 0.02 * truncated.tokens


@pytest.mark.parametrize("draft", [True, False])
def test_greedy_text_is_identical_or_named(draft: bool) -> None:
    greedy = SamplingSettings()
    texts = written(target_model(), draft_model() if draft else None, greedy, rows=2)
    assert report(texts, target_model(), None, greedy).verdict == EXACT
    tokens = list(texts[0].tokens)
    tokens[-1] = (tokens[-1] + 1) % V
    found = report([replace(texts[0], tokens=tuple(tokens))], target_model(), None, greedy)
    assert found.verdict == NOT_EXACT
    assert found.impossible[0][1:3] == (99, tokens[-1])
    assert found.impossible[0][3] > 0


class Forgetful(PromptLookupDrafter):
    """Proposes nothing."""

    def propose(self, rows, plans, context) -> Proposal:  # type: ignore[no-untyped-def]
        return super().propose(rows, [replace(plan, limit=0) for plan in plans], context)


def test_a_draft_that_never_proposes_shows_nothing_of_the_rule() -> None:
    found = report(written(target_model(), None, ONE), target_model(), Forgetful(), ONE)
    assert found.alpha is None
    assert all(sight.changed == 0 for sight in found.sights if sight.fault in FAULTS)
    assert found.verdict == UNCLEAR
    assert "another draft" in found.reason


@pytest.mark.slow
def test_texts_that_end_do_not_look_dependent() -> None:
    """Whether a text ends depends on its last token, so what is paired must not depend on where texts end."""
    target = target_model()
    ends = frozenset(range(6))
    requests = [Request(PROMPT, 40, RandomStream(9, i), ends) for i in range(500)]
    new, rounds = decode(target, requests, ONE, draft_model(), FixedLength(3))
    texts = [Text((*PROMPT, *row), len(PROMPT), tuple(r)) for row, r in zip(new, rounds, strict=True)]
    assert sum(text.tokens[-1] in ends for text in texts) > 300
    found = report(texts, target, None, ONE)
    assert found.p is not None
    assert found.p > 0.01


def test_a_sample_of_nothing_says_nothing() -> None:
    assert Battery(()).p == 1.0
    found = report(written(target_model(), draft_model(), ONE, rows=1), target_model(), draft_model(), ONE)
    assert found.verdict == UNCLEAR
    assert "too few" in found.reason
    numbers = [[0.01] * 50 for _ in range(DRAWS)]  # as far from uniform as can be
    planted = Planted("a fault", False, numbers, moved=5.0)
    assert _sight(planted, 50, 9).p < 1e-9
    assert _sight(planted, 50, 0).p == 1.0  # where no test has run, none shows anything
    json.dumps(found.to_dict(), allow_nan=False)


def test_seeds_share_nothing() -> None:
    seeds = {text_seed(seed, number) for seed in range(40) for number in range(40)}
    assert len(seeds) == 1600


def test_truncation_before_temperature_is_named() -> None:
    """As llama.cpp does it: another law, which the report recognises."""
    target = target_model()
    cold = SamplingSettings(temperature=0.6, top_p=0.9)
    generator = np.random.default_rng(0)
    texts = []
    for _ in range(20):
        tokens = list(PROMPT)
        for _ in range(50):
            law = target.probs_after(tokens)
            kept = truncated(law.log().unsqueeze(0), 1.0, 0, 0.9, 0.0)[0] > 0
            bent = (law.log() / 0.6).softmax(0) * kept
            tokens.append(int(generator.choice(V, p=(bent / bent.sum()).numpy())))
        texts.append(Text(tuple(tokens), len(PROMPT)))
    found = report(texts, target, None, cold)
    assert found.verdict == NOT_EXACT
    assert "as in llama.cpp" in found.reason


@pytest.mark.parametrize(
    ("drawn", "declared"),
    [(0.8, 1.0), slow(1.0, 0.7), slow(0.5, 0.9), (0.6, 0.0), (2.5, 1.0)],
    ids=["colder", "hotter", "much colder", "declared as greedy", "far hotter"],
)
def test_the_temperature_that_fits_is_named(drawn: float, declared: float) -> None:
    """With a draft, which changes nothing about the law."""
    texts = written(target_model(), draft_model(), SamplingSettings(temperature=drawn), 60)
    found = report(texts, target_model(), None, SamplingSettings(temperature=declared))
    assert found.verdict == NOT_EXACT
    assert found.likeliest is not None
    assert found.likeliest.error is not None
    assert abs(found.likeliest.temperature - drawn) < 4 * found.likeliest.error < 0.2 * drawn
    assert f"of all temperatures {found.likeliest.temperature:.3g} ± " in found.reason
    assert f"declared is {declared:g}" in found.reason


def test_no_other_temperature_is_named_where_it_is_not_the_fault() -> None:
    exact = report(written(target_model(), draft_model(), ONE, 60), target_model(), None, ONE)
    assert exact.likeliest is not None
    assert exact.likeliest.error is not None
    assert abs(exact.likeliest.temperature - 1.0) < 4 * exact.likeliest.error
    assert "temperatures" not in exact.reason
    greedy = written(target_model(), None, SamplingSettings(), 60)
    cold = report(greedy, target_model(), None, ONE)
    assert "of all temperatures 0.25 or less fits the tokens best, declared is 1" in cold.reason
    assert cold.likeliest is not None
    assert (cold.likeliest.error, cold.likeliest.beyond) == (None, "less")
    right = report(greedy, target_model(), None, SamplingSettings())
    assert (right.verdict, right.likeliest) == (EXACT, None)


@pytest.mark.parametrize(("limits", "temperature"), thinned([{"top_p": 0.9}, {"min_p": 0.1}], [0.0, 1.0]))
def test_no_temperature_is_named_where_what_is_allowed_depends_on_it(limits: dict[str, Any], temperature: float) -> None:
    texts = written(target_model(), None, SamplingSettings(temperature=0.7, **limits), 60)
    found = report(texts, target_model(), None, SamplingSettings(temperature=temperature, **limits))
    assert (found.verdict, found.likeliest) == (NOT_EXACT, None)


@pytest.mark.parametrize("declared", [0.0, 1.0])
def test_top_k_allows_the_same_tokens_at_any_temperature(declared: float) -> None:
    texts = written(target_model(), None, SamplingSettings(temperature=0.7, top_k=5), 60)
    found = report(texts, target_model(), None, SamplingSettings(temperature=declared, top_k=5)).likeliest
    assert found is not None
    assert found.error is not None
    assert abs(found.temperature - 0.7) < 4 * found.error < 0.2


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_likeliest_temperature_is_that_of_the_greatest_likelihood(top_p: float) -> None:
    """The cubic through a few values beside a search through all."""
    torch.manual_seed(0)
    law = truncated(torch.randn(600, 300) * 2, 1.0, 0, top_p, 0.0)
    tokens = (law**1.3).multinomial(1).squeeze(-1)
    fit = TemperatureFit()
    fit.add(law[:350], tokens[:350])
    fit.add(law[350:], tokens[350:])
    found = fit.likeliest(0.9)
    assert found is not None
    assert found.error is not None
    at = law.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
    chance = {t: float((at * 0.9 / t - (law ** (0.9 / t)).sum(-1).log()).sum()) for t in np.arange(0.5, 1.2, 0.001)}
    best = max(chance, key=lambda t: chance[t])
    assert abs(found.temperature - best) < 0.3 * found.error
    curved = (chance[best - 0.05] - 2 * chance[best] + chance[best + 0.05]) / 0.05**2
    assert found.error == pytest.approx((-1 / curved) ** 0.5, rel=0.1)


def test_laws_of_one_token_tell_no_temperature() -> None:
    fit = TemperatureFit()
    fit.add(torch.eye(4), torch.arange(4))
    assert fit.likeliest(1.0) is None
    fit.add(torch.full((500, 300), 1 / 300), torch.randint(0, 300, (500,)))
    assert fit.likeliest(1.0) is None
