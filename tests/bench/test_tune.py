"""Predictions along a text against closed forms, against enumeration, and against rounds that were really run."""

from __future__ import annotations

import json
import tomllib
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from outrider import forced, theory
from outrider.cli.main import run as run_cli
from outrider.costs import Costs, DraftSeconds
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.drafters import Drafter, ModelDrafter, PromptLookupDrafter
from outrider.errors import ParameterError
from outrider.forced import draft_laws_along, logits_along, target_laws_along
from outrider.models.table import TableModel
from outrider.randomness import RandomStream
from outrider.request.prompt_file import read_prompts
from outrider.sampling import SamplingSettings
from outrider.tune.chances import Chances, chances
from outrider.tune.configuration import Configuration, read_configuration
from outrider.tune.predict import predict
from tests.helpers.betas import betas_along
from tests.helpers.toys import SETTINGS, table

ONE = SamplingSettings(temperature=1.0)
FLAT = Costs({1: 1.0, 17: 1.0})
V = 12


def written(target: TableModel, sampling: SamplingSettings, tokens: int, seed: int = 0) -> list[int]:
    new, _ = decode(target, [Request((0, 1), tokens, RandomStream(seed))], sampling)
    return [0, 1, *new[0]]


@pytest.mark.parametrize("name", SETTINGS)
def test_laws_along_a_text_are_those_that_decoding_meets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forced, "MOST", 32)
    target, sampling = table(1, V), SETTINGS[name]
    text = written(target, ONE, 70)
    laws = torch.cat(list(target_laws_along(target, text, 2, sampling)))
    for t in (0, 1, 31, 32, 33, 69):
        prompt = text[: 2 + t]
        logits = target.probs_after(prompt).log().unsqueeze(0)
        from outrider.sampling import Context, standardize

        wanted = standardize(logits, sampling, [Context(torch.tensor(prompt), 2)])[0]
        assert torch.allclose(laws[t], wanted)


def test_logits_along_a_text_start_where_they_should() -> None:
    target = table(1, V)
    text = written(target, ONE, 5)
    (every,) = logits_along(target, text, 1)
    assert torch.equal(torch.cat(list(logits_along(target, text, 4))), every[3:])
    parts = list(logits_along(target, text, 1, chunk=3))
    assert [len(part) for part in parts] == [3] * (len(every) // 3) + ([len(every) % 3] if len(every) % 3 else [])
    assert torch.equal(torch.cat(parts), every)


@pytest.mark.parametrize(
    "drafter", [ModelDrafter(table(2, V), step_seconds=0.0), PromptLookupDrafter()], ids=["model", "copy"]
)
def test_betas_are_those_that_the_rounds_report(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.round import Extras

    monkeypatch.setattr(forced, "MOST", 32)
    target = table(1, V)
    new, rounds = decode(target, [Request((0, 1), 60, RandomStream(1))], ONE, drafter, FixedLength(1), Extras(betas=True))
    along = betas_along(drafter, target, [0, 1, *new[0]], 2, ONE)
    at = 0
    compared = 0
    for record in rounds[0]:
        if record.drafted and record.betas:
            assert along[at] == pytest.approx(record.betas[0])
            compared += 1
        at += len(record.tokens)
    assert compared > 5


def test_no_proposal_is_nan() -> None:
    target = table(1, V)
    laws = torch.cat(list(draft_laws_along(PromptLookupDrafter(), target, [0, 1, 2, 3, 4], 3, ONE)))
    assert bool(laws.isnan().all())


def same(chance: float, tokens: int) -> Chances:
    accept = tuple((chance,) * 16 for _ in range(tokens))
    return Chances(2, accept, (chance,) * tokens)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_equal_chances_give_the_closed_form(alpha: float) -> None:
    """Along a long text the ends do not matter: Leviathan's Equation 1 and Theorem 3.8."""
    candidate = predict("x", [same(alpha, 3000)], FLAT, DraftSeconds(0.1), 0.1)
    for one in candidate.predictions:
        assert one.tokens_per_round == pytest.approx(theory.expected_tokens(alpha, one.length), rel=0.01)
        assert one.speedup == pytest.approx(theory.walltime_factor(alpha, one.length, 0.1), rel=0.01)
        assert one.closed_form == pytest.approx(theory.walltime_factor(alpha, one.length, 0.1))
    assert candidate.best.length == theory.best_gamma(alpha, 0.1, 16)


def test_the_walk_is_the_mean_over_all_outcomes() -> None:
    """Enumerated: every pattern of acceptances along a text of five tokens."""
    chance = (0.9, 0.2, 0.5, 0.7, 0.4)
    text = Chances(2, tuple(chance[t : t + 16] for t in range(5)), chance)
    costs = Costs({1: 1.0, 2: 1.5, 3: 1.7})
    rounds = seconds = 0.0
    for pattern in product((False, True), repeat=5):
        weight = 1.0
        for accepted, p in zip(pattern, chance, strict=True):
            weight *= p if accepted else 1 - p
        t = 0
        while t < 5:
            offered = min(2, 5 - t - 1)
            kept = next((i for i in range(offered) if not pattern[t + i]), offered)
            rounds += weight
            seconds += weight * (costs.verify(offered + 1) + 0.3 * offered)
            t += kept + 1
    found = predict("x", [text], costs, DraftSeconds(0.3), 0.0).predictions[2]
    assert found.tokens_per_round == pytest.approx(5 / rounds)
    assert found.speedup == pytest.approx(5 * costs.verify(1) / seconds)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_copies_at_temperature_0_are_predicted_to_the_token(length: int) -> None:
    """There the rounds are certain: what is predicted is what is run."""
    target = table(5, 6, order=1)
    text = written(target, SamplingSettings(), 80)
    one = chances(PromptLookupDrafter(), target, text, 2, SamplingSettings())
    _, rounds = decode(
        target, [Request((0, 1), 80, RandomStream(0))], SamplingSettings(), PromptLookupDrafter(), FixedLength(length)
    )
    assert predict("x", [one], FLAT, DraftSeconds(), 0.0).predictions[length].tokens_per_round == 80 / len(rounds[0])


@pytest.mark.slow
def test_model_drafts_are_predicted_on_average() -> None:
    """Twelve thousand tokens run with fixed lengths, beside the prediction from other texts. 4 % is above 4 σ."""
    target, drafter = table(1, V), ModelDrafter(table(1, V, sharpness=1.2), step_seconds=0.1)
    measured = [chances(drafter, target, written(target, ONE, 400, seed), 2, ONE) for seed in range(30)]
    candidate = predict("x", measured, FLAT, DraftSeconds(0.1), 0.0)
    assert 0.4 < candidate.alpha < 0.95
    for length in (1, 4):
        requests = [Request((0, 1), 400, RandomStream(77, i)) for i in range(30)]
        _, rounds = decode(target, requests, ONE, drafter, FixedLength(length))
        per_round = 12_000 / sum(map(len, rounds))
        assert candidate.predictions[length].tokens_per_round == pytest.approx(per_round, rel=0.04)


def test_a_draft_that_never_proposes_is_plain_decoding() -> None:
    nothing = Chances(2, ((),) * 10, ())
    candidate = predict("x", [nothing], FLAT, DraftSeconds(0.1), 0.0)
    assert candidate.alpha == 0.0
    assert candidate.coverage == 0.0
    assert candidate.best.length == 0
    assert all(one.speedup == pytest.approx(1.0) for one in candidate.predictions)


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration('folder/with "quotes" and ü', "prompt-lookup", 5),
        Configuration(None, "model.gguf", "auto", "int8", "openvino", "cpu"),
        Configuration("x", None, 0),
    ],
)
def test_a_configuration_survives_its_file(configuration: Configuration, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(configuration.to_toml(), encoding="utf-8")
    found = read_configuration(path)
    assert found.get("target") == configuration.target
    assert found["dtype"] == configuration.dtype
    if configuration.draft is None:
        assert found["plain"] is True
    else:
        assert found["draft"] == (configuration.draft,)
        assert found["num_draft_tokens"] == str(configuration.num_draft_tokens)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "'x' is not one of"),
        ("dtype = 3", "dtype can't be 3"),
        ("a b", "can't be read"),
        ("plain = 1", "plain can't be 1"),
    ],
)
def test_a_bad_configuration_gets_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=said):
        read_configuration(path)


def test_equivalents_name_the_same_draft_and_length() -> None:
    found = Configuration("t", "drafty-7b", 4).equivalents(9)
    assert found.keys() == {"transformers", "vLLM", "llama.cpp"}
    assert "num_assistant_tokens = 4;" in found["transformers"]
    assert "-md drafty-7b --draft-max 4" in found["llama.cpp"]
    assert json.loads(found["vLLM"].split("'")[1]) == {"model": "drafty-7b", "num_speculative_tokens": 4}
    assert Configuration("t", "ngram:table=x", 4).equivalents(9) == {}
    assert Configuration("t", "head", 4).equivalents(9) == {}
    assert Configuration("t", "auto", 4).equivalents(9) == {}, "no model has this name"
    own = Configuration("t", "drafty-7b:dtype=int4,num_tokens=9", 4).equivalents(9)
    assert own == found, "our options mean nothing to others"
    assert Configuration("t", "drafty-7b", "auto").equivalents(4) == found, "nor does a length that adapts"
    assert all("no fixed one" in said for said in Configuration("t", "drafty-7b", "auto").equivalents(0).values())


def test_prompts_of_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text("one\n\ntwo\n")
    assert read_prompts(path) == ["one", "two"]
    path.write_text('{"prompt": "one"}\n{"prompt": "two\\nlines"}\n')
    assert read_prompts(path) == ["one", "two\nlines"]
    for bad in ("", '{"prompt": 3}', '{"text": "x"}'):
        path.write_text(bad)
        with pytest.raises(ParameterError, match="prompts file"):
            read_prompts(path)


def run(*arguments: str) -> tuple[int, str, str]:
    with CliRunner().isolation() as streams:
        code = run_cli(list(arguments))
        return code, streams[0].getvalue().decode(), streams[1].getvalue().decode()


@pytest.mark.slow
def test_tuned_as_a_user_would_and_used(tmp_path: Path) -> None:
    prompts, path = tmp_path / "p.txt", tmp_path / "c.toml"
    prompts.write_text("1 2 3 1 2 3 1 2 3\nfoo(a)\\nfoo(b)\n")
    code, out, err = run(
        "tune", "--dtype", "float32", "--prompts", str(prompts), "--max-new-tokens", "24", "--output", str(path), "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert {one["name"] for one in found["candidates"]} == {"prompt-lookup", "suffix"}
    assert found["chosen"] in found["measured"]
    assert tomllib.loads(path.read_text())["dtype"] == "float32"
    code, out, err = run("generate", "--config", str(path), "1 2 3", "--raw", "--max-new-tokens", "4", "--json")
    assert code == 0, err
    assert len(json.loads(out)["tokens"]) == 4
    code, out, err = run("generate", "--config", str(path), "--dtype", "float7", "x")
    assert "float7" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--target", "b"], "are the same"),
        (["--max-new-tokens", "1"], "max_new_tokens must be 2 or more"),
        (["--prompts", "/nowhere/p"], "prompts file /nowhere/p can't be read"),
        (["--output", "/nowhere/c.toml"], "there is no folder /nowhere"),
        (["--output", "."], "it is a folder; name a file in it"),
        (["--temperature", "nan"], "temperature must be in 0 … 1e6"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str) -> None:
    code, out, err = run("tune", *arguments)
    assert code == 2
    assert said in err
    assert not out
