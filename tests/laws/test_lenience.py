"""Lenience is lossy, and its price is bounded: no token above target / l, by enumeration of every draft and outcome.

The controls recover by other laws: two break the bound and must be seen to. l = 1 is the exact rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import outrider
from outrider.acceptance.lenience import lenient_betas, lenient_law, near_best, verify_lenient, verify_near_best
from outrider.acceptance.verify import Uniforms, Verdict, verify
from outrider.cli.main import run
from outrider.compare import compare
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import ModelDrafter
from outrider.errors import ParameterError
from outrider.models.loading import load
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.records import Round
from outrider.report.trace import render_trace
from outrider.round import Extras
from outrider.sampling import SamplingSettings, standardize
from outrider.sampling.draw import draw
from outrider.theory import acceptance_probability
from tests.helpers.enumerate import Law, round_joint, target_joint
from tests.helpers.toys import PROMPT, SETTINGS, law_of, table

LENIENCES = (1.0, 0.5, 0.3, 0.1)
SAMPLED = SETTINGS["temperature 1"]
V = 3
ROUNDING = 1e-12


def random_laws(count: int = 400, vocabulary: int = 6) -> tuple[Tensor, Tensor]:
    """Pairs of laws of all degrees of sharpness, some with tokens that they exclude."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, count, vocabulary, generator=generator, dtype=torch.float64)
    noise *= torch.linspace(0.1, 6.0, count, dtype=torch.float64).unsqueeze(-1)
    noise[torch.rand(noise.shape, generator=generator) < 0.1] = -20.0
    laws = noise.softmax(-1)
    laws = torch.where(laws < 1e-6, 0.0, laws)
    laws = laws / laws.sum(-1, keepdim=True)
    return laws[0], laws[1]


@pytest.mark.parametrize("lenience", LENIENCES)
def test_the_law_stays_below_the_bound_and_nearest_to_the_target(lenience: float) -> None:
    """s ≤ p / l everywhere, s ≤ p wherever q ≤ p, and the total variation is what acceptance alone makes inevitable."""
    p, q = random_laws()
    s = lenient_law(p, q, lenience)
    assert s.sum(-1).allclose(torch.ones(len(p), dtype=torch.float64))
    assert bool((s <= p / lenience + ROUNDING).all())
    assert bool((s <= p + ROUNDING)[q <= p].all())
    moved = (s - p).abs().sum(-1) / 2
    alpha_l = lenient_betas(p, q, lenience)
    assert moved.allclose(alpha_l - acceptance_probability(p, q), atol=ROUNDING)
    divergence = torch.where(s > 0, s * (s / p).log(), 0.0).sum(-1)
    assert bool((divergence <= -math.log(lenience) + ROUNDING).all())


def of_round(
    lenience: float, draft: Law | int, target: Law, length: int, rule: Callable[..., Verdict] = verify_lenient
) -> Tensor:
    """The joint law of length + 1 tokens."""
    return round_joint(partial(rule, lenience=lenience), target, draft, V, length)


@pytest.mark.parametrize("lenience", LENIENCES)
def test_the_rule_has_that_law(lenience: float) -> None:
    """Every draft, every outcome, decisions found by bisection: the first token of a round follows s, to 1e-12."""
    for seed in range(3):
        target, draft = law_of(table(seed, V), SAMPLED), law_of(table(seed + 50, V), SAMPLED)
        first = of_round(lenience, draft, target, 1).sum(-1)
        assert first.allclose(lenient_law(target(()), draft(()), lenience), atol=ROUNDING)


@pytest.mark.parametrize("name", ["temperature 1", "top-p", "all"])
@pytest.mark.parametrize("lenience", LENIENCES)
def test_no_token_is_likelier_than_target_over_l_whatever_came_before(lenience: float, name: str) -> None:
    """Each token's law given those before it, in rounds of three tokens; drafts drawn from a law, and a point mass."""
    target, draft = law_of(table(0, V), SETTINGS[name]), law_of(table(50, V), SETTINGS[name])
    for proposal in (draft, 1):
        joint = of_round(lenience, proposal, target, 2)
        assert worst_excess(joint, target, lenience) <= 1e-9
        if lenience == 1.0:
            assert joint.allclose(target_joint(target, V, 3), atol=ROUNDING)


def worst_excess(joint: Tensor, target: Law, lenience: float) -> float:
    """The most by which a token's probability, given those before it, exceeds target / l."""
    worst = -1.0
    for done in range(joint.dim()):
        marginal = joint.sum(dim=tuple(range(done + 1, joint.dim()))) if done + 1 < joint.dim() else joint
        for prefix in torch.cartesian_prod(*[torch.arange(V)] * done).reshape(-1, done).tolist() if done else [[]]:
            row = marginal[tuple(prefix)] if prefix else marginal
            if float(row.sum()) > 1e-9:
                worst = max(worst, float((row / row.sum() - target(tuple(prefix)) / lenience).max()))
    return worst


def recovers_from(
    kind: str, target: Tensor, draft: Tensor, tokens: Tensor, randomness: Uniforms, *, lenience: float
) -> Verdict:
    """The lenient acceptance with another law of the recovered token."""
    good = verify_lenient(target, draft, tokens, randomness, lenience=lenience)
    at = good.num_accepted[:, None, None].expand(-1, 1, target.shape[-1])
    p, q = (
        torch.cat([x, torch.zeros_like(target[:, :1])], 1)[:, : target.shape[1]].gather(1, at)[:, 0] for x in (target, draft)
    )
    weights = p if kind == "target" else (q - p).clamp(min=0)
    other = draw(torch.where(weights.sum(-1, keepdim=True) > 0, weights, p), randomness.next_token)
    return Verdict(good.num_accepted, torch.where(good.num_accepted < tokens.shape[-1], other, good.next_token))


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_other_recoveries_break_the_bound_and_are_seen_to(kind: str) -> None:
    excess = []
    for seed in range(2):
        target, draft = law_of(table(seed, V), SAMPLED), law_of(table(seed + 50, V), SAMPLED)
        excess.append(worst_excess(of_round(0.5, draft, target, 1, partial(recovers_from, kind)), target, 0.5))
    assert max(excess) > 0.01


def generated(
    settings: SamplingSettings, lenience: float, samples: int = 100, seed: int = 0, target: TableModel | None = None
) -> tuple[list[list[int]], list[list[Round]]]:
    target = target or table(1, V)
    near = TableModel(0.5 * target._probs + 0.5 * table(2, V)._probs)
    requests = [Request(PROMPT, 12, RandomStream(seed, i)) for i in range(samples)]
    extras = Extras(logprobs=True, betas=True, drafts=True)
    return decode(target, requests, settings, ModelDrafter(near), FixedLength(3), extras, lenience=lenience)


@pytest.mark.parametrize("name", ["temperature 1", "top-k"])
def test_measured_alpha_is_the_sum_that_the_paper_gives(name: str) -> None:
    """Accepted against Σ min(p / l, q) at the tested positions, six standard deviations: false alarms 2e-9 a case."""
    rates = []
    for lenience in LENIENCES:
        tokens, rounds = generated(SETTINGS[name], lenience)
        records = [record for row in rounds for record in row]
        betas = [beta for record in records for beta in (record.betas or ())[: record.tested]]
        accepted = sum(record.accepted for record in records)
        assert abs(accepted - sum(betas)) < 6 * sum(b * (1 - b) for b in betas) ** 0.5
        assert sum(len(record.lenient) for record in records) > 0 or lenience == 1.0
        rates.append(sum(betas) / len(betas))
        assert all(0 <= token < V for row in tokens for token in row)
    assert rates == sorted(rates)


@pytest.mark.parametrize("name", SETTINGS)
def test_lenience_one_is_the_exact_decoder_to_the_bit(name: str) -> None:
    target, draft = table(1, V), table(2, V)
    requests = [Request(PROMPT, 12, RandomStream(0, i)) for i in range(20)]
    plain = decode(target, requests, SETTINGS[name], ModelDrafter(draft), FixedLength(3))
    requests = [Request(PROMPT, 12, RandomStream(0, i)) for i in range(20)]
    assert decode(target, requests, SETTINGS[name], ModelDrafter(draft), FixedLength(3), lenience=1.0)[0] == plain[0]
    laws = torch.stack([target.probs_after([0, i % V]) for i in range(3)]).unsqueeze(0)
    tokens, uniforms = torch.tensor([[1, 2]]), Uniforms(torch.full((1, 2), 0.3).double(), torch.tensor([0.4]).double())
    exact, same = verify(laws, laws[:, :2].roll(1, -1), tokens, uniforms), None
    same = verify_lenient(laws, laws[:, :2].roll(1, -1), tokens, uniforms, lenience=1.0)
    assert (exact.num_accepted.item(), exact.next_token.item()) == (same.num_accepted.item(), same.next_token.item())
    assert same.lenient is not None
    assert not same.lenient.any()


@pytest.mark.parametrize("name", ["greedy", "biased"])
@pytest.mark.parametrize("lenience", LENIENCES)
def test_greedy_lenience_keeps_tokens_near_the_best_and_only_those(lenience: float, name: str) -> None:
    """Each token is the target's best, or was drafted, has l times its probability at least, and is marked as lenient.

    Probabilities are those before they are made one-hot, after the bias.
    """
    settings = SamplingSettings(logit_bias={0: -1.5, 2: 1.0} if name == "biased" else {})
    other = 0
    for seed in range(10):
        target = table(seed, V)
        (row,), (records,) = generated(settings, lenience, samples=1, target=target)
        origins = [origin for record in records for origin in record.origins]
        for i, token in enumerate(row):
            law = standardize(target.probs_after([*PROMPT, *row[:i]]).log().unsqueeze(0), settings.processed_only())[0]
            assert law[token] >= lenience * law.max() - ROUNDING
            assert (origins[i] == "lenient") == (token != int(law.argmax()))
            other += origins[i] == "lenient"
    assert (other > 0) == (lenience < 1.0)


def test_near_best_at_every_threshold() -> None:
    laws = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    assert near_best(laws, 0.5).tolist() == [[True, True, True, False]]
    assert near_best(laws, 0.51).tolist() == [[True, False, False, False]]
    assert near_best(laws, 1e-6).tolist() == [[True, True, True, False]]  # never what has no probability


def test_near_best_accepts_a_prefix_of_what_was_offered() -> None:
    laws = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]], dtype=torch.float64).unsqueeze(0)
    hot = torch.nn.functional.one_hot(laws.argmax(-1), 3).double()
    uniforms = Uniforms(torch.zeros(1, 2).double(), torch.zeros(1).double())
    for drafted, offered, lenience, wanted in (
        ([1, 2], 2, 0.5, (2, 0, [True, False])),
        ([1, 2], 1, 0.5, (1, 2, [True, False])),
        ([1, 0], 2, 0.5, (1, 2, [True, False])),
        ([1, 2], 2, 0.7, (0, 0, [False, False])),
        ([0, 2], 2, 1.0, (2, 0, [False, False])),
    ):
        got = verify_near_best(hot, laws, torch.tensor([drafted]), uniforms, torch.tensor([offered]), lenience)
        assert got.lenient is not None
        assert (got.num_accepted.item(), got.next_token.item(), got.lenient[0].tolist()) == wanted


def test_records_results_and_json_say_lossy(target_folder: Path, draft_folder: Path, cache: Path) -> None:
    target, draft = load(str(target_folder), dtype="float32"), load(str(draft_folder), dtype="float32")
    options = {"max_new_tokens": 24, "num_draft_tokens": 4, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    result = outrider.generate(target, "the quick", draft=draft, lenience=0.02, **options)  # type: ignore[call-overload]
    assert result.lossy
    assert all(record.lossy for record in result.rounds)
    assert result.stats.lenient == sum(record.origins.count("lenient") for record in result.rounds) > 0
    out = json.loads(json.dumps(result.to_dict()))
    assert out["lossy"] is True
    assert (out["lenience"], out["stats"]["lossy"], out["stats"]["lenient"]) == (0.02, True, result.stats.lenient)
    exact = outrider.generate(target, "the quick", draft=draft, **options)  # type: ignore[call-overload]
    assert not exact.lossy
    assert "lossy" not in json.dumps(exact.to_dict())
    page = render_trace(result, target, "the quick")
    assert "LOSSY" in page
    assert "kept by lenience alone" in page
    assert "LOSSY" not in render_trace(exact, target, "the quick")


def test_a_lossy_run_that_differs_is_not_reported_as_a_bug(target_folder: Path, draft_folder: Path, cache: Path) -> None:
    target, draft = load(str(target_folder), dtype="float32"), load(str(draft_folder), dtype="float32")
    options = {"max_new_tokens": 24, "num_draft_tokens": 4, "lenience": 1e-3, "ignore_eos": True}
    found = compare(target, "the quick", draft, options, list)
    assert not found.identical
    assert found.divergence is None
    assert "LOSSY" in found.agreement
    assert not found.plain.lossy


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1.5, math.nan, True, "0.5"])
def test_leniences_out_of_range_are_refused(wrong: float) -> None:
    with pytest.raises(ParameterError, match="lenience must be in"):
        decode(table(1, V), [Request(PROMPT, 2, RandomStream(0))], SAMPLED, lenience=wrong)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--lenience", "0"], "lenience must be in"),
        (["--lenience", "0.5", "--plain"], "lenience must be 1 without a draft"),
        (["--lenience", "0.5", "--num-draft-tokens", "0"], "lenience must be 1 without a draft"),
        (["--alternatives", "4", "--num-draft-tokens", "0"], "alternatives must be 0 without a draft, got 4"),
        (["--alternatives", "4", "--plain"], "alternatives must be 0 without a draft, got 4"),
    ],
)
def test_the_command_refuses_in_one_line(options: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert told in shown.err


@pytest.mark.slow
def test_the_bench_measures_each_lenience_beside_its_formula(
    target_folder: Path, draft_folder: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two settings, l = 1 and 0.05, resumed from the log; the drift is zero exactly where nothing is lossy."""
    prompts, log = tmp_path / "prompts.jsonl", tmp_path / "runs.jsonl"
    prompts.write_text('{"prompt": "the quick brown"}\n{"prompt": "def f(x):"}\n')
    command = ["bench", "lenience", "--target", str(target_folder), "--draft", str(draft_folder), "--dtype", "float32"]
    command += ["--task", f"jsonl:{prompts}", "--lenience", "1", "--lenience", "0.05", "--num-draft-tokens", "3"]
    command += ["--max-new-tokens", "24", "--log", str(log), "--json"]
    assert run(command) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(log.read_text().splitlines()) == 1 + 2 * 2 * 3
    assert [(row["setting"], row["lenience"], row["lossy"]) for row in out["rows"]] == [
        ("greedy", 1.0, False),
        ("greedy", 0.05, True),
        ("temperature 1, top-p 1", 1.0, False),
        ("temperature 1, top-p 1", 0.05, True),
    ]
    greedy, lenient_greedy, sampled, lenient = out["rows"]
    assert greedy["differ"] == 0 == greedy["best_gap"]
    assert greedy["verdict"] == "exact"
    assert lenient_greedy["differ"] > 0 < lenient_greedy["best_gap"]
    assert lenient_greedy["verdict"] == "not exact"
    assert lenient_greedy["alpha"] == pytest.approx(lenient_greedy["expected"])  # nothing is left to chance
    assert sampled["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < lenient["divergence"] <= math.log(20)
    assert lenient["moved"] > 0
    for row in (sampled, lenient):
        assert abs(row["z"]) < 6
        assert 0 < row["expected"] < 1
    assert lenient["expected"] > sampled["expected"]
    assert sampled["paper_alpha"] == "0.62"
    before = log.read_text()
    assert run(command) == 0
    again = json.loads(capsys.readouterr().out)
    assert log.read_text() == before
    assert [row["alpha"] for row in again["rows"]] == [row["alpha"] for row in out["rows"]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--lenience", "2"], "lenience must be in"),
        (["--num-draft-tokens", "0"], "num_draft_tokens must be 1 or more"),
    ],
)
def test_the_bench_refuses_in_one_line(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "lenience", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert told in shown.err


def test_a_lossy_text_is_called_so_where_nobody_watches(
    target_folder: Path, draft_folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "the quick", "--raw", "--target", str(target_folder), "--draft", str(draft_folder)]
    assert run([*words, "--max-new-tokens", "4", "--num-draft-tokens", "2", "--lenience", "0.5"]) == 0
    shown = capsys.readouterr()
    assert "LOSSY: lenience 0.5" in shown.err
    assert "LOSSY" not in shown.out
