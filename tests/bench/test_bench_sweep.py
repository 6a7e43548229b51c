"""The sweep over draft lengths: its figures follow from the rounds, its predictions from the formulas, its log resumes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner, Result

import outrider
from outrider.bench.acceptance import read
from outrider.bench.settings import Setting
from outrider.bench.sweep import SweepRun
from outrider.bench.sweep_summary import Tables, percentiles, summarise
from outrider.cli.main import cli
from outrider.costs import Costs, DraftSeconds
from outrider.drafters import ModelDrafter, PromptLookupDrafter
from outrider.errors import ParameterError
from outrider.models.table import TableModel
from outrider.request.choices import make_drafter
from outrider.sampling import SamplingSettings
from outrider.theory import expected_tokens, race_acceptance_probability, walltime_factor
from outrider.theory.chinchilla import TARGET_MS, TOKEN_MS, alpha_of, redrawn
from tests.helpers.heads import Shape, write_head
from tests.helpers.marks import slow

GREEDY, SAMPLED = Setting(0.0, 1.0), Setting(1.0, 1.0)
TABLES = Tables(Costs({1: 1.0, 3: 2.0}), {"d": DraftSeconds(0.25)}, DraftSeconds(0.25))


def made(length: int, rounds: list[list[Any]], setting: Setting = SAMPLED, tokens: list[int] | None = None) -> SweepRun:
    count = sum(kept for kept, *_ in rounds)
    return SweepRun("one", "x", setting.name, length, 5, tokens or list(range(count)), rounds)


def test_percentiles_count_each_token_of_a_round() -> None:
    found = percentiles([10.0, 40.0], weights=[3, 1])
    assert (found.mean, found.p50) == (17.5, 10.0)
    assert found.p99 == pytest.approx(10.0 + 30.0 * 0.97)
    assert percentiles([1.0, 2.0, 3.0]).p50 == 2.0


def test_each_run_is_predicted_by_the_costs_of_its_own_moment() -> None:
    slow = {"verify": {"1": 2.0, "3": 4.0}, "steps": {"d": 0.5}, "context": 8}
    quick = {"verify": {"1": 1.0, "3": 2.0}, "steps": {"d": 0.25}, "context": 8}
    rounds = [[3, 2, 2, 4.0, "d"], [1, 2, 0, 4.0, "d"]]
    runs = [replace(made(2, rounds), example=name, moment=at) for name, at in (("one", slow), ("two", quick))]
    plain = [
        replace(made(0, [[1, 0, 0, 2.0, None]] * 4), example=name, moment=at) for name, at in (("one", slow), ("two", quick))
    ]
    (found,) = summarise([*runs, *plain], [SAMPLED], TABLES, {}, None)  # type: ignore[arg-type]
    base, row = found.rows
    assert base.predicted.ms_per_token == pytest.approx(1500.0)
    assert row.predicted.ms_per_token == pytest.approx((2 * 5.0 + 2 * 2.5) / 2 / 4 * 1000)
    assert row.predicted.speedup == pytest.approx((8.0 + 4.0) / (10.0 + 5.0))
    assert found.c == pytest.approx(0.375 / 1.5)
    assert found.step_ms == pytest.approx(375.0)
    mixed = summarise([replace(runs[0], moment=None), runs[1], *plain], [SAMPLED], TABLES, {}, None)  # type: ignore[arg-type]
    assert mixed[0].c == pytest.approx(0.25), "some were not timed: the standing tables"


def test_figures_and_predictions_of_two_lengths_by_hand() -> None:
    plain = made(0, [[1, 0, 0, 1.1, None]] * 6)
    drafted = made(2, [[3, 2, 2, 2.0, "d"], [1, 2, 0, 2.4, "d"], [2, 2, 1, 2.2, "d"]])
    (found,) = summarise([drafted, plain], [SAMPLED], TABLES, {}, None)  # type: ignore[arg-type]
    base, row = found.rows
    assert (base.length, row.length) == (0, 2)
    assert base.ms_per_token == pytest.approx(1100.0)
    assert row.ms_per_token == pytest.approx(1100.0)
    assert row.speedup.median == pytest.approx(1.0)
    assert row.tokens_per_round == 2.0
    assert row.efficiency == pytest.approx(2 / 3)
    assert row.acceptance_rate == pytest.approx(3 / 5)  # tested: 2, 1, 2
    assert row.loop.mean == pytest.approx(2200.0)
    # By the costs: each round verifies three tokens (2 s) and drafts two (0.25 s each).
    assert row.predicted.loop_ms == pytest.approx(2500.0)
    assert row.predicted.ms_per_token == pytest.approx(1250.0)
    assert row.predicted.ratio == pytest.approx(1250 / 1100)
    assert row.predicted.speedup == pytest.approx(6 / 7.5)
    assert found.c == 0.25
    assert found.alpha == pytest.approx(2 / 3)  # the last round left out: two accepted, then one failure
    assert row.predicted.closed_form == pytest.approx(walltime_factor(2 / 3, 2, 0.25))
    assert row.predicted.formula == pytest.approx((1 + 2 / 3 + 4 / 9) / (2 * 0.25 + 2.0))
    assert base.predicted.formula == base.predicted.closed_form == 1.0
    assert row.identical is None


def test_a_position_without_an_offer_counts_as_rejected_in_the_closed_form() -> None:
    never = made(2, [[1, 0, 0, 1.0, None]] * 8 + [[3, 2, 2, 1.0, "d"], [1, 0, 0, 1.0, None]])
    (found,) = summarise([made(0, [[1, 0, 0, 1.0, None]] * 12), never], [SAMPLED], TABLES, {}, None)  # type: ignore[arg-type]
    assert found.alpha == pytest.approx(2 / 10)
    assert found.rows[1].acceptance_rate == 1.0


def test_the_slope_is_what_a_further_drafted_token_adds() -> None:
    runs = [made(k, [[1, k, 0, 1.0 + 0.3 * k, "d"]] * 4) for k in (1, 2, 5)]
    (found,) = summarise([made(0, [[1, 0, 0, 9.0, None]] * 4), *runs], [SAMPLED], TABLES, {}, None)  # type: ignore[arg-type]
    assert found.slope_ms == pytest.approx(300.0)
    assert found.slope_error_ms == pytest.approx(0.0, abs=1e-3)
    assert found.step_ms == 250.0


def test_the_slopes_error_tells_noise_from_a_figure() -> None:
    rng = random.Random(5)
    runs = [made(k, [[1, k, 0, 1.0 + rng.gauss(0.0, 0.2), "d"] for _ in range(20)]) for k in (1, 2, 5)]
    (found,) = summarise([made(0, [[1, 0, 0, 9.0, None]] * 20), *runs], [SAMPLED], TABLES, {}, None)  # type: ignore[arg-type]
    assert found.slope_ms is not None
    assert found.slope_error_ms is not None
    assert abs(found.slope_ms) < 4 * found.slope_error_ms
    assert found.slope_error_ms == pytest.approx(200 / (60 * 26 / 9) ** 0.5, rel=0.3)  # sigma / sqrt(n var of K)


def test_a_text_that_differs_is_reported_with_its_verdict(target_folder: Path) -> None:
    model = outrider.load(target_folder, dtype="float64")
    prompt = model.tokenizer.encode("the quick brown fox")
    text = outrider.generate(model, prompt, draft=None, max_new_tokens=8, ignore_eos=True).tokens
    wrong = [*text[:5], (text[5] + 1) % model.vocab_size, *text[6:]]
    rounds: list[list[Any]] = [[1, 0, 0, 1.0, None]] * 8
    runs = [made(0, rounds, GREEDY, text), made(1, rounds, GREEDY, wrong), made(2, rounds, GREEDY, text)]
    (found,) = summarise(runs, [GREEDY], TABLES, {("one", "x"): prompt}, model)
    assert [row.identical for row in found.rows] == [1, 0, 1]
    assert found.rows[1].divergences["one"].position == 5
    assert not found.rows[1].divergences["one"].near_tie
    assert found.rows[2].divergences == {}


def test_chens_figure_is_redrawn_from_what_the_paper_states() -> None:
    assert expected_tokens(alpha_of("HumanEval"), 4) == pytest.approx(4.0)
    for domain, efficiency in (("HumanEval", 0.8), ("XSum", 0.62)):
        assert redrawn(domain, 0).relative_time == pytest.approx(1.0)
        assert redrawn(domain, 4).efficiency == pytest.approx(efficiency)
        assert redrawn(domain, 4).loop_ms == pytest.approx(21.3)
        # The measured speed-up of Table 1 is within a tenth of what the formulas give (toyllm finds 2.65 and 2.05).
        assert 1 / redrawn(domain, 4).relative_time == pytest.approx(TARGET_MS / TOKEN_MS[domain], rel=0.1)
    times = [redrawn("XSum", length).relative_time for length in range(8)]
    assert 3 <= times.index(min(times)) <= 5


def command(folder: Path, draft: Path | str, *more: str) -> Result:
    options = ["bench", "sweep", "--target", str(folder), "--draft", str(draft), "--dtype", "float64", "--task", "chat"]
    options += ["--prompts", "3", "--max-new-tokens", "12", "--temperature", "0"]
    return CliRunner().invoke(cli, [*options, *more])


def test_a_perfect_draft_gives_k_plus_one_tokens_a_round_and_the_same_texts(target_folder: Path) -> None:
    result = command(target_folder, target_folder, "--lengths", "1-3", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["sweeps"]
    assert found["alpha"] == 1.0
    assert [row["length"] for row in found["rows"]] == [0, 1, 2, 3]
    for row in found["rows"]:
        assert row["identical"] == row["prompts"] == 3
        assert row["tokens"] == 36
        assert row["tokens_per_round"] == row["length"] + 1  # 12 is divisible by 1 … 4
        assert row["efficiency"] == 1.0
        assert row["predicted"]["closed_form"] == pytest.approx((row["length"] + 1) / (row["length"] * found["c"] + 1))
        assert row["loop"]["p50"] <= row["loop"]["p90"] <= row["loop"]["p99"]


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_from_its_log(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    options = ("--lengths", "0-2", "--log", str(log), "--json")
    first = json.loads(command(target_folder, draft_folder, *options).stdout)["sweeps"]
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 3 * 3
    again = json.loads(command(target_folder, draft_folder, *options).stdout)["sweeps"]
    assert again == first
    assert log.read_text() == "".join(lines)
    log.write_text("".join(lines[:7]) + lines[7][:40])  # killed while writing
    resumed = json.loads(command(target_folder, draft_folder, *options).stdout)["sweeps"]
    kept = log.read_text().splitlines(keepends=True)
    assert kept[:7] == lines[:7]
    assert len(kept) == len(lines)
    assert [row["tokens_per_round"] for row in resumed[0]["rows"]] == [row["tokens_per_round"] for row in first[0]["rows"]]
    wider = json.loads(command(target_folder, draft_folder, "--lengths", "3", *options[2:]).stdout)["sweeps"]
    assert [row["length"] for row in wider[0]["rows"]] == [0, 3]
    refused = command(target_folder, draft_folder, *options, "--max-new-tokens", "13")
    assert isinstance(refused.exception, ParameterError)
    assert "max_new_tokens: 12 there, 13 here" in str(refused.exception)
    log.write_text(log.read_text().replace('"machine": ["', '"machine": ["another '))
    elsewhere = command(target_folder, draft_folder, *options)
    assert "other settings (machine: " in str(elsewhere.exception)


def test_the_table_has_measured_and_predicted_side_by_side(target_folder: Path, draft_folder: Path) -> None:
    result = command(target_folder, draft_folder, "--lengths", "0-2")
    assert result.exit_code == 0, result.output
    for words in (
        "speed-up",
        "predicted / measured",
        "Chen, redrawn",
        "quickest: K =",
        "texts equal to those of K = 0: 9 of 9",
    ):
        assert words in result.stdout


@pytest.mark.parametrize("kind", [slow("autoregressive"), "blockwise"])
def test_a_head_is_swept_and_beside_copies_too(kind: Shape, target_folder: Path, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head", kind, outrider.load(target_folder, dtype="float64").vocab_size, blocks=2)
    for more in ((), ("--draft", "prompt-lookup")):
        result = command(target_folder, f"head:path={path}", "--lengths", "3", "--json", *more)
        assert result.exit_code == 0, result.output
        (found,) = json.loads(result.stdout)["sweeps"]
        assert all(row["identical"] == 3 for row in found["rows"])


@pytest.mark.parametrize("bad", ["7-0", "x", "0-65", "-1"])
def test_lengths_out_of_range_are_refused(bad: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "sweep", "--lengths", bad])
    assert isinstance(result.exception, ParameterError)
    assert "lengths must be" in str(result.exception)


def test_runs_are_told_apart_by_their_prompt() -> None:
    run = made(1, [[1, 0, 0, 1.0, None]])
    assert run.key != replace(run, digest="y").key


# alpha, position by position


P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.6, 0.2]], dtype=torch.float64)
Q = torch.tensor([[0.4, 0.5, 0.1], [0.2, 0.1, 0.7], [0.2, 0.6, 0.2]], dtype=torch.float64)
CHANCE = SamplingSettings(temperature=1.0)


def test_betas_of_two_tables_by_hand() -> None:
    target, draft, text = TableModel(P), ModelDrafter(TableModel(Q), step_seconds=0.0), [1, 2, 2, 0]
    betas, raced, offered = read(cast(Any, target), draft, CHANCE, [0], text)
    before = [0, *text[:-1]]
    assert betas == pytest.approx(torch.minimum(P, Q).sum(-1)[before].tolist())
    assert raced == pytest.approx(race_acceptance_probability(P, Q)[before].tolist())
    assert all(one <= beta for one, beta in zip(raced, betas, strict=True))
    assert offered == 4
    greedy, same, _ = read(cast(Any, target), draft, SamplingSettings(), [0], text)
    assert greedy == same == [float(P[token].argmax() == Q[token].argmax()) for token in before]


def test_a_copy_is_a_point_mass_and_offers_nothing_without_a_match() -> None:
    betas, raced, offered = read(cast(Any, TableModel(P)), PromptLookupDrafter(), CHANCE, [0], [1, 0, 1, 0])
    assert offered == 2
    # Nothing to copy at first; then after 0 comes 1, after 1 comes 0.
    assert betas == pytest.approx([0.0, 0.0, 0.3, 0.1])
    assert raced == pytest.approx(betas), "a certain draft loses nothing"


@pytest.mark.parametrize("spec", ["self", "early-exit:layers=1", "suffix", "random"])
def test_teacher_forced_betas_are_those_that_the_decoder_reports(target_folder: Path, spec: str) -> None:
    """Where a round of `generate` begins, it reports the same beta as the walk along its text."""
    model = outrider.load(target_folder, dtype="float64")
    draft: Any = outrider.load(target_folder, dtype="float64") if spec == "self" else spec
    drafter = make_drafter(draft, model)
    assert drafter is not None
    prompt = model.tokenizer.encode("the quick brown fox the quick brown")
    made = outrider.generate(
        model,
        prompt,
        draft=drafter,
        num_draft_tokens=1,
        max_new_tokens=20,
        temperature=1.0,
        seed=5,
        betas=True,
        ignore_eos=True,
    )
    betas, _, _ = read(model, drafter, CHANCE, prompt, made.tokens)
    at = 0
    for record in made.rounds:
        if record.betas:
            assert betas[at] == pytest.approx(record.betas[0], abs=1e-6)
        at += len(record.tokens)
    if spec == "self":
        assert betas == pytest.approx([1.0] * 20)


def test_the_alpha_command(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    options = ["bench", "alpha", "--target", str(target_folder), "--draft", str(target_folder), "--draft", str(draft_folder)]
    options += ["--draft", "prompt-lookup", "--dtype", "float64", "--task", "chat", "--prompts", "2"]
    options += ["--max-new-tokens", "16", "--log", str(log)]
    result = CliRunner().invoke(cli, [*options, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["setting"] for row in rows] == ["greedy"] * 3 + ["temperature 1, top-p 1"] * 3
    same, other, copies = rows[3:]
    assert same["alpha"]["value"] == pytest.approx(1.0)
    assert 0.0 < other["alpha"]["value"] < 1.0
    assert other["deviation"] > 0.0
    assert 0.0 < other["by_position"]["value"] < other["alpha"]["value"]
    assert copies["by_position"]["value"] == pytest.approx(copies["alpha"]["value"])
    assert copies["offered"] < 1.0
    assert rows[0]["alpha"]["value"] == 1.0
    kept = log.read_text()
    assert len(kept.splitlines()) == 1 + 2 * 2 * 4
    table = CliRunner().invoke(cli, options)
    assert "alpha (95 %)" in table.stdout
    assert log.read_text() == kept
    older = [{key: value for key, value in json.loads(line).items() if key != "raced"} for line in kept.splitlines()]
    log.write_text("".join(json.dumps(line) + "\n" for line in older))
    again = json.loads(CliRunner().invoke(cli, [*options, "--json"]).stdout)["rows"]
    assert [row["by_position"] for row in again] == [None] * 6
