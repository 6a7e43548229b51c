"""The audit accepts exact samplers and rejects the planted bugs, on toy tables through the real decoder.

False alarms: an exact sampler is called not exact in one audit of 10,000 at most. Seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import outrider.round as round_module
from outrider.audit.planted import FAULTS, fault_law
from outrider.audit.sampled import Text, TextAudit
from outrider.audit.support import within_rounding
from outrider.audit.transform import keys, transform
from outrider.audit.uniformity import REJECT, run_battery, tokens_to_see
from outrider.audit.verdict import EXACT, NOT_EXACT, UNCLEAR, Report, judge
from outrider.cli.main import cli
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from outrider.models.table import TableModel
from outrider.proposal import Proposal
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.toys import WRONG_RULES, table

V = 60
PROMPT = (1, 2)
ONE = SamplingSettings(temperature=1.0)


def written(
    target: TableModel,
    drafter: Drafter | None,
    sampling: SamplingSettings,
    rows: int = 40,
    tokens: int = 100,
    known: bool = True,
) -> list[Text]:
    requests = [Request(PROMPT, tokens, RandomStream(3, i)) for i in range(rows)]
    new, rounds = decode(target, requests, sampling, drafter, FixedLength(3))
    return [
        Text((*PROMPT, *row), len(PROMPT), tuple(records) if known else ()) for row, records in zip(new, rounds, strict=True)
    ]


def report(texts: list[Text], target: TableModel, drafter: Drafter | None, sampling: SamplingSettings) -> Report:
    audit = TextAudit(target, drafter, sampling)
    for text in texts:
        audit.add(text)
    return judge(audit, "", len(texts))


def target_model() -> TableModel:
    return table(1, V, order=1)


def draft_model() -> ModelDrafter:
    """Half the target's law, half another one."""
    mixed = 0.5 * torch.stack([target_model().probs_after([i]) for i in range(V)])
    mixed = mixed + 0.5 * torch.stack([table(2, V, order=1).probs_after([i]) for i in range(V)])
    return ModelDrafter(TableModel(mixed), step_seconds=0.1)


@pytest.mark.parametrize(
    "sampling",
    [
        ONE,
        SamplingSettings(temperature=0.7),
        SamplingSettings(temperature=1.0, top_p=0.9),
        SamplingSettings(temperature=1.0, top_k=20),
    ],
    ids=["temperature 1", "temperature 0.7", "top-p", "top-k"],
)
def test_an_exact_sampler_passes_and_every_fault_would_have_been_seen(sampling: SamplingSettings) -> None:
    found = report(written(target_model(), draft_model(), sampling), target_model(), draft_model(), sampling)
    assert found.verdict == EXACT, found.reason
    assert found.exit_code == 0
    assert all(sight.seen for sight in found.sights)
    assert {*FAULTS} <= {sight.fault for sight in found.sights}
    assert found.impossible == ()


@pytest.mark.parametrize("known", [True, False], ids=["rounds known", "rounds unknown"])
@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_are_rejected_by_the_sample_that_the_audit_recommends(
    name: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_module, "verify", WRONG_RULES[name])
    found = report(written(target_model(), draft_model(), ONE, 80, known=known), target_model(), draft_model(), ONE)
    assert found.recommended is not None
    assert found.recommended <= found.tokens
    assert found.verdict == NOT_EXACT
    assert found.exit_code == 1


def test_without_knowing_the_draft_a_wrong_rule_is_seen_and_little_text_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = written(target_model(), draft_model(), ONE, known=False)
    assert report(texts, target_model(), None, ONE).verdict == EXACT
    assert report(texts[:9], target_model(), None, ONE).verdict == UNCLEAR
    monkeypatch.setattr(round_module, "verify", WRONG_RULES["always accept"])
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


def test_a_point_mass_draft_is_audited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = table(1, 12, order=1, sharpness=1.0)
    found = report(written(target, PromptLookupDrafter(), ONE), target, PromptLookupDrafter(), ONE)
    assert found.verdict == EXACT, found.reason
    monkeypatch.setattr(round_module, "verify", WRONG_RULES["residual = target"])
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


def test_the_transform_by_hand() -> None:
    target = torch.tensor([[0.5, 0.2, 0.2, 0.1]])
    draft = torch.tensor([[0.1, 0.4, 0.0, 0.5]])
    orders = keys(target, draft)
    half = torch.tensor([0.5], dtype=torch.float64)

    def u(order: str, token: int) -> float:
        return float(transform(target, orders[order], torch.tensor([token]), half))

    assert [u("token", token) for token in range(4)] == pytest.approx([0.25, 0.6, 0.8, 0.95])
    assert [u("target", token) for token in range(4)] == pytest.approx([0.25, 0.7, 0.7, 0.95])  # 1 and 2 are tied
    assert [u("ratio", token) for token in range(4)] == pytest.approx([0.45, 0.8, 0.1, 0.95])  # 2 (∞), 0 (5), 1 (½), 3 (⅕)


def test_where_nothing_is_proposed_the_target_gives_the_order() -> None:
    target = torch.tensor([[0.1, 0.9]])
    assert torch.equal(keys(target, torch.full((1, 2), torch.nan))["ratio"], target)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_laws_and_leave_untested_positions_alone(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(5, 9, generator=generator, dtype=torch.float64)
    draft = torch.rand(5, 9, generator=generator, dtype=torch.float64)
    target[0, 3], draft[1, 4] = 0.0, 0.0
    target, draft = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
    draft[4] = torch.nan
    tested = torch.tensor([True, True, True, False, True])
    law = fault_law(FAULTS[name], target, draft, tested)
    assert torch.allclose(law.sum(-1), torch.ones(5, dtype=torch.float64))
    assert bool((law >= 0).all())
    assert torch.equal(law[3:], target[3:])
    assert float((law[:3] - target[:3]).abs().max()) > 0.01


@pytest.mark.parametrize("rule", ["always accept", "residual = target", "ratio upside down"])
def test_a_faults_law_is_what_the_faulty_rule_gives(rule: str) -> None:
    """The closed form beside the law of the rule itself, enumerated."""
    from outrider.audit.enumerate import round_joint

    name = {
        "always accept": "every draft token accepted",
        "residual = target": "recovered token drawn from the target",
        "ratio upside down": "acceptance ratio upside down",
    }[rule]
    target, draft = table(1, 4, order=0).probs_after([]), table(2, 4, order=0).probs_after([])
    joint = round_joint(WRONG_RULES[rule], lambda _: target, lambda _: draft, 4, 1)
    law = fault_law(FAULTS[name], target.unsqueeze(0), draft.unsqueeze(0), torch.tensor([True]))
    assert torch.allclose(joint.sum(1), law[0], atol=1e-9)


def uniform(count: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    noise = np.random.default_rng(seed)
    return noise.random(count), np.arange(count) // 100, np.arange(count) % 4


def test_the_batterys_false_alarms_are_as_stated() -> None:
    """p ≤ 0.05 in about 5 % of exact samples at most: Bonferroni is conservative. 200 samples: 20 is above 4 σ."""
    values = []
    for seed in range(200):
        u, texts, places = uniform(1000, seed)
        values.append(run_battery({"a": u, "b": 1 - u}, texts, places).p)
    assert sum(p <= 0.05 for p in values) <= 20
    assert min(values) > REJECT


@pytest.mark.parametrize(
    ("bend", "part"),
    [
        (lambda u, texts, places: u**1.2, "a order"),
        (lambda u, texts, places: np.where(places == 2, u**1.6, u), "place 3"),
        (lambda u, texts, places: np.where(np.arange(len(u)) % 2 == 1, (np.roll(u, 1) + 0.1 * u) % 1, u), "neighbours"),
        (lambda u, texts, places: (np.floor(u * 20) + (u * 20 % 1) * 0.5 + (np.floor(u * 20) % 2) * 0.5) / 20, ""),
    ],
    ids=["bent", "bent at one place", "dependent", "jagged within bins"],
)
def test_the_battery_sees(bend: Callable[..., np.ndarray], part: str) -> None:
    u, texts, places = uniform()
    bent = run_battery({"a": np.clip(bend(u, texts, places), 0, 1)}, texts, places)
    if part:
        assert bent.p < REJECT
        assert bent.worst is not None
        assert part in bent.worst.name
    else:  # what is below the width of a bin is too fine for it, and said to be so
        assert tokens_to_see({"a": bend(u, texts, places)}) > 4000


def test_tokens_to_see_is_enough_and_not_far_too_many() -> None:
    u, _, _ = uniform(4000)
    needed = int(tokens_to_see({"a": u**1.1}))
    assert 1000 < needed < 40_000
    seen = 0
    for seed in range(20):
        noise = np.random.default_rng(seed + 1).random(needed)
        seen += run_battery({"a": noise**1.1}, np.arange(needed) // 100, np.full(needed, -1)).p < REJECT
    assert seen >= 18
    assert tokens_to_see({"a": u}) == float("inf")


LOGITS = torch.tensor([5.0, 4.0, 3.99, 1.0, -torch.inf])


@pytest.mark.parametrize(
    ("sampling", "token", "rounding", "expected"),
    [
        (SamplingSettings(), 1, 0.1, False),
        (SamplingSettings(), 1, 0.5, True),
        (SamplingSettings(temperature=1.0, top_k=2), 2, 0.001, False),
        (SamplingSettings(temperature=1.0, top_k=2), 2, 0.01, True),
        (SamplingSettings(temperature=1.0, top_p=0.5), 1, 0.01, False),
        (SamplingSettings(temperature=1.0, top_p=0.57), 1, 0.01, True),
        (SamplingSettings(temperature=1.0, min_p=0.37), 1, 0.001, False),
        (SamplingSettings(temperature=1.0, min_p=0.37), 1, 0.01, True),
        (ONE, 4, 50.0, False),
    ],
)
def test_the_edge_of_a_law_is_as_wide_as_the_rounding(
    sampling: SamplingSettings, token: int, rounding: float, expected: bool
) -> None:
    assert within_rounding(LOGITS, token, sampling, rounding) is expected


class Forgetful(PromptLookupDrafter):
    """Proposes nothing."""

    def propose(self, rows, plans, context) -> Proposal:  # type: ignore[no-untyped-def]
        return super().propose(rows, [replace(plan, limit=0) for plan in plans], context)


def test_a_draft_that_never_proposes_shows_nothing_of_the_rule() -> None:
    found = report(written(target_model(), None, ONE), target_model(), Forgetful(), ONE)
    assert found.alpha is None
    assert all(sight.changed == 0 for sight in found.sights)


def run(*arguments: str) -> tuple[int, str, str]:
    from outrider.cli.main import run as run_cli

    runner = CliRunner()
    with runner.isolation() as streams:
        code = run_cli(["audit", *arguments])
        return code, streams[0].getvalue().decode(), streams[1].getvalue().decode()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "0"], "tokens must be 1 or more, got 0"),
        (["--temperature", "-1"], "temperature must be finite and 0 or more"),
        (["--rounding", "-1"], "rounding must be in [0, 100)"),
        (["--save", "/nowhere/x.jsonl"], "there is no folder /nowhere"),
        (["--outputs", "/nowhere/x.jsonl"], "outputs file /nowhere/x.jsonl can't be read"),
        (["--extra", "[1]"], "extra must be a JSON object"),
        (["--outputs", "a", "--endpoint", "b"], "exclude each other"),
        (["--temperature", "1", "--temperature", "0", "--save", "x"], "texts of one temperature"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "gave no answer"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert code in (1, 2)
    assert said in err
    assert "Traceback" not in err
    assert not out


def test_texts_are_saved_resumed_and_audited_again(tmp_path: Path) -> None:
    saved = tmp_path / "texts.jsonl"
    common = ["--dtype", "float32", "--json", "--temperature", "0.8"]
    code, out, _ = run("--tokens", "64", "--save", str(saved), *common)
    first = json.loads(out)
    assert code == 2
    assert first["verdict"] == UNCLEAR  # of 64 tokens
    lines = saved.read_text().splitlines()
    assert len(lines) == first["audits"][0]["texts"]
    code, out, _ = run("--tokens", "64", "--save", str(saved), *common)
    assert json.loads(out)["audits"][0]["histograms"] == first["audits"][0]["histograms"]
    assert saved.read_text().splitlines() == lines  # nothing new was needed
    code, out, _ = run("--outputs", str(saved), "--draft", "self:temperature=1.5", *common)
    assert json.loads(out)["audits"][0]["histograms"] == first["audits"][0]["histograms"]
    code, _, err = run("--outputs", str(saved), "--temperature", "1", "--dtype", "float32")
    assert code == 2
    assert "temperature is 0.8" in err


@pytest.mark.parametrize(
    "line", ["{}", "[]", "x", '{"prompt": "a", "tokens": [true]}', '{"prompt": "a", "tokens": [99999999]}']
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text(line + "\n")
    code, _, err = run("--outputs", str(path))
    assert code == 2
    assert "line 1" in err


def test_the_command_is_listed() -> None:
    assert "audit" in cli.commands


def test_a_wrong_law_is_seen_however_the_vocabulary_is_ordered() -> None:
    """The law's mass moved between two tokens that are equally likely for target and draft: only the id order shows it."""
    law = torch.full((1, 40), 1 / 40, dtype=torch.float64)
    bent: Tensor = law.clone()
    bent[0, :20] *= 1.4
    bent[0, 20:] *= 0.6
    noise = np.random.default_rng(0)
    tokens = torch.from_numpy(noise.choice(40, 2000, p=bent[0].numpy()))
    numbers = {
        order: transform(law.expand(2000, -1), key.expand(2000, -1), tokens, torch.from_numpy(noise.random(2000))).numpy()
        for order, key in keys(law, law).items()
    }
    found = run_battery(numbers, np.arange(2000) // 100, np.full(2000, -1))
    assert found.worst is not None
    assert "token order" in found.worst.name
    assert found.p < REJECT
