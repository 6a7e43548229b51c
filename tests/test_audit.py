"""The audit accepts exact samplers and rejects the planted bugs, on toy tables through the real decoder.

False alarms: an exact sampler is called not exact in one audit of 10,000 at most. Seeds are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import outrider.round as round_module
from outrider.audit.endpoint import EndpointError, endpoint_texts
from outrider.audit.planted import FAULTS, fault_law
from outrider.audit.sampled import TextAudit
from outrider.audit.sources import text_seed
from outrider.audit.support import rounding_needed, within_rounding
from outrider.audit.text import Text
from outrider.audit.transform import keys, transform
from outrider.audit.uniformity import REJECT, Battery, ks_p, run_battery, tokens_to_see
from outrider.audit.verdict import EXACT, MATTERS, NOT_EXACT, UNCLEAR, Report, judge
from outrider.cli.main import cli
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from outrider.models.table import TableModel
from outrider.proposal import Proposal
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from outrider.sampling.truncate_device import truncated
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
    return judge(audit, "")


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
    found = report(written(target_model(), draft_model(), sampling, 70), target_model(), draft_model(), sampling)
    assert found.verdict == EXACT, found.reason
    assert found.exit_code == 0
    assert all(sight.seen or sight.fault in found.reason for sight in found.sights)
    assert all(sight.seen for sight in found.sights if sight.changed >= MATTERS)
    assert sum(sight.seen for sight in found.sights) >= 7
    assert {*FAULTS} <= {sight.fault for sight in found.sights}
    assert found.impossible == ()


@pytest.mark.parametrize("known", [True, False], ids=["rounds known", "rounds unknown"])
@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_are_rejected(name: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_module, "verify", WRONG_RULES[name])
    found = report(written(target_model(), draft_model(), ONE, 80, known=known), target_model(), draft_model(), ONE)
    assert found.recommended is not None
    assert found.verdict == NOT_EXACT
    assert found.p is not None
    assert found.p < 1e-4
    assert found.exit_code == 1


def test_without_knowing_the_draft_a_wrong_rule_is_seen_and_little_text_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = written(target_model(), draft_model(), ONE, known=False)
    known = report(texts, target_model(), None, ONE)
    assert known.verdict == EXACT, known.reason
    assert "without knowing the draft" in known.reason
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


def test_noise_used_again_has_the_law_that_is_foretold() -> None:
    """200,000 draws each; 0.005 is above 4 σ of a frequency."""
    generator = torch.Generator().manual_seed(3)
    target, draft = (torch.rand(1, 7, generator=generator, dtype=torch.float64) ** 2 for _ in range(2))
    target, draft = target / target.sum(), draft / draft.sum()
    count = 200_000
    noise = torch.rand(2, count, generator=generator, dtype=torch.float64)
    residual = (target - draft).clamp(min=0)
    for name, again in (("noise of the proposal used again", 0), ("noise of the rejection used again", 1)):
        proposed = torch.searchsorted(draft[0].cumsum(0), noise[0]).clamp(max=6)
        kept = noise[1] * draft[0, proposed] < target[0, proposed]
        recovered = torch.searchsorted(residual[0].cumsum(0) / residual.sum(), noise[again]).clamp(max=6)
        tokens = torch.where(kept, proposed, recovered)
        found = torch.bincount(tokens, minlength=7) / count
        law = fault_law(FAULTS[name], target, draft, torch.tensor([True]))[0]
        assert torch.allclose(found.double(), law, atol=0.005)


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


def uniform(count: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    noise = np.random.default_rng(seed)
    return noise.random(count), np.arange(count) % 4


def test_the_batterys_false_alarms_are_as_stated() -> None:
    """p ≤ 0.05 in about 5 % of exact samples at most: Bonferroni is conservative. 200 samples: 20 is above 4 σ."""
    values = []
    for seed in range(200):
        u, places = uniform(1000, seed)
        values.append(run_battery({"target": u, "token": 1 - u}, places).p)
    assert sum(p <= 0.05 for p in values) <= 20
    assert min(values) > REJECT


@pytest.mark.parametrize(
    ("bend", "part"),
    [
        (lambda u, places: u**1.2, "target order"),
        (lambda u, places: np.where(places == 2, u**1.6, u), "place 3"),
        (lambda u, places: np.where(np.arange(len(u)) % 2 == 1, (np.roll(u, 1) + 0.1 * u) % 1, u), "neighbours"),
        (lambda u, places: (np.floor(u * 20) + (u * 20 % 1) * 0.5 + (np.floor(u * 20) % 2) * 0.5) / 20, ""),
    ],
    ids=["bent", "bent at one place", "dependent", "jagged within bins"],
)
def test_the_battery_sees(bend: Callable[..., np.ndarray], part: str) -> None:
    u, places = uniform()
    bent = run_battery({"target": np.clip(bend(u, places), 0, 1)}, places)
    if part:
        assert bent.p < REJECT
        assert bent.worst is not None
        assert part in bent.worst.name
    else:  # what is below the width of a bin is too fine for it, and said to be so
        assert tokens_to_see(bend(u, places)) > 4000


@pytest.mark.parametrize("power", [1.05, 1.1, 1.3])
def test_tokens_to_see_is_enough(power: float) -> None:
    """Foretold from 5,000 numbers of a bent law, the tokens show it in all but a few of twenty samples."""
    u, _ = uniform(5000)
    needed = tokens_to_see(u**power)
    if needed == float("inf"):
        assert power < 1.1
        return
    seen = 0
    for seed in range(20):
        noise = np.random.default_rng(seed + 1).random(int(needed))
        seen += 40 * ks_p(noise**power) < REJECT
    assert seen >= 19
    assert tokens_to_see(u) == float("inf")


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
    assert all(sight.changed == 0 for sight in found.sights if sight.fault in FAULTS)
    assert found.verdict == UNCLEAR
    assert "another draft" in found.reason


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
        (["--extra", "{}"], "give --endpoint, too"),
        (["--outputs", "a", "--tokens", "5"], "--outputs is there already"),
        (["--outputs", "a", "--num-draft-tokens", "2"], "for Outrider's own decoder"),
        (["--temperature", "0", "--plot", "x.svg"], "a greedy law has no histogram"),
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
    found = run_battery(numbers, np.full(2000, -1))
    assert found.worst is not None
    assert "token order" in found.worst.name
    assert found.p < REJECT


def test_texts_that_end_do_not_look_dependent() -> None:
    """Whether a text ends depends on its last token, so what is paired must not depend on where texts end."""
    target = target_model()
    ends = frozenset(range(6))
    texts = []
    for i in range(500):
        new, rounds = decode(target, [Request(PROMPT, 40, RandomStream(9, i), ends)], ONE, draft_model(), FixedLength(3))
        texts.append(Text((*PROMPT, *new[0]), len(PROMPT), tuple(rounds[0])))
    assert sum(text.tokens[-1] in ends for text in texts) > 300
    found = report(texts, target, None, ONE)
    assert found.p is not None
    assert found.p > 0.01


def test_a_sample_of_nothing_says_nothing() -> None:
    assert Battery(()).p == 1.0
    found = report(written(target_model(), draft_model(), ONE, rows=1), target_model(), draft_model(), ONE)
    assert found.verdict == UNCLEAR
    assert "too few" in found.reason
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


def test_what_rounding_would_be_needed() -> None:
    assert rounding_needed(LOGITS, 1, SamplingSettings()) == pytest.approx(0.5, rel=0.02)
    assert rounding_needed(LOGITS, 4, ONE) == float("inf")
    assert rounding_needed(LOGITS, 2, SamplingSettings(temperature=1.0, top_k=2)) == pytest.approx(0.005, rel=0.02)


@pytest.mark.parametrize("extra", ["suffix:memory=yes", "suffix:store=/tmp/nowhere.store"])
def test_a_draft_that_remembers_the_text_is_refused(extra: str) -> None:
    code, _, err = run("--draft", extra, "--dtype", "float32")
    assert code == 2
    assert "remembers earlier texts" in err


class Server:
    """An OpenAI server that answers what it is told to, on a port of its own."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> None:
        outer = self
        self.asked: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                code, content = answer(body)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Server:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Tokenizer:
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [1 + len(text) % 5, 2]

    def decode(self, tokens: list[int]) -> str:
        return "".join("\ufffd" if token == 7 else "t" for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(V)}


def text_model() -> Any:
    model: Any = target_model()
    model.tokenizer = Tokenizer()
    model.end_tokens = frozenset({0})
    return model


@pytest.mark.parametrize("form", ["token_ids", "tokens", "content", "spelled"])
def test_a_server_is_audited(form: str) -> None:
    """The server samples from the very law; whether it names the end of a text or not."""
    model = text_model()

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        assert body["temperature"] == 1.0
        stream = RandomStream(body["seed"])
        new, _ = decode(
            target_model(), [Request(body["prompt"], 60, stream, frozenset({0}))], ONE, draft_model(), FixedLength(2)
        )
        tokens = new[0]
        ended = tokens[-1] == 0
        if form in ("tokens", "content") and ended:
            tokens = tokens[:-1]
        choice: dict[str, Any] = {"text": "x", "finish_reason": "stop" if ended else "length"}
        if form == "content":
            choice["logprobs"] = {"content": [{"id": token} for token in tokens]}
        elif form == "spelled":
            choice["logprobs"] = {"tokens": [f"t{token}" for token in tokens]}
        else:
            choice[form] = tokens
        return 200, json.dumps({"choices": [choice]}).encode()

    with Server(answer) as server:
        texts = list(endpoint_texts(server.url, model, ONE, 3000))
    assert len({body["seed"] for body in server.asked}) == len(server.asked)
    assert any(text.tokens[-1] == 0 for text in texts)
    found = report(texts, target_model(), None, ONE)
    assert found.verdict == EXACT, found.reason


@pytest.mark.parametrize(
    ("code", "content", "said"),
    [
        (500, b"oh", "HTTPError: 'oh'"),
        (200, b"oh", "gave no answer|did not answer in JSON"),
        (200, b"[]", "is it OpenAI's completions"),
        (200, b"{}", "no answer of OpenAI's completions"),
        (200, b'{"choices": [null]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"token_ids": 5}]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"token_ids": [true]}]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"logprobs": {"content": "abc"}}]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"token_ids": [9999]}]}', "gave token 9999"),
        (200, b'{"choices": [{"text": "hello"}]}', "text without token ids"),
        (200, b'{"choices": [{"logprobs": {"tokens": ["hello"]}}]}', "spells tokens otherwise"),
        (200, b'{"choices": [{"text": ""}]}', "8 times in a row without a token"),
    ],
)
def test_a_server_that_answers_otherwise_gets_one_line(code: int, content: bytes, said: str) -> None:
    with Server(lambda body: (code, content)) as server, pytest.raises(EndpointError, match=said):
        list(endpoint_texts(server.url, text_model(), ONE, 10))


def test_tokens_that_a_server_leaves_out_are_not_passed_over() -> None:
    """llama.cpp's server names one token of several that make a character: the text is cut there."""

    def answer(tokens: list[int], told: int) -> tuple[int, bytes]:
        content = [{"id": token} for token in tokens]
        choice = {"text": "x", "finish_reason": "length", "logprobs": {"content": content}}
        return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": told}}).encode()

    with Server(lambda body: answer([4, 5, 7, 6], 5)) as server:
        (text,) = endpoint_texts(server.url, text_model(), ONE, 2)
    assert text.new == (4, 5)
    with (
        Server(lambda body: answer([4, 5, 6], 5)) as server,
        pytest.raises(EndpointError, match="made 5 tokens and named 3"),
    ):
        list(endpoint_texts(server.url, text_model(), ONE, 2))


def test_repeated_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "outputs.jsonl"
    line = json.dumps({"prompt": "a", "tokens": list(range(5, 45))})
    path.write_text(f"{line}\n{line}\n")
    code, _, err = run("--outputs", str(path))
    assert code == 2
    assert "repeats line 1" in err
