"""Walltime on paper: hand-worked passes, the paper's numbers, limits, and what grows with what."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cli.main import run
from outrider.errors import ParameterError
from outrider.theory import best_gamma, walltime_factor
from outrider.theory.scale import Machine, Network, Pair, balance, fit, forward, stops_paying

TARGET, DRAFT, TPUS = Network(70e9, 80, 8192), Network(4e9, 8, 6144), Machine()
FITTED = fit(TARGET, DRAFT, TPUS, 14.1e-3, 1.8e-3)
PAIR = Pair(TARGET, DRAFT, FITTED)
gammas = st.integers(0, 12)
alphas = st.floats(0.05, 0.99)


def test_a_pass_worked_by_hand() -> None:
    """100 parameters of 2 bytes, 3 layers of width 4, two devices: 10 bytes/s and 8 operations/s each, hops of 1 s."""
    machine = Machine(devices=2, bandwidth=10.0, speed=8.0, memory=1.0, hop_seconds=1.0, link=16.0, fixed_seconds=0.5)
    got = forward(Network(100, 3, 4), machine, rows=2, tokens=3, context=5)
    assert got.weights == 200 / 20
    assert got.cache == 2 * 5 * (2 * 3 * 4 * 2) / 20
    assert got.operations == 6 * (2 * 100 + 4 * 3 * 4 * 5) / 16
    assert got.all_reduces == 6 * (2 * 1.0 + 2 * 1 / 2 * (6 * 4 * 2) / 16)
    assert got.seconds == max(10 + 24, 165) + got.all_reduces + 0.5


def test_one_device_has_nothing_to_reduce() -> None:
    assert forward(TARGET, replace(FITTED, devices=1)).all_reduces == 0


def test_the_fit_gives_both_times_back_and_sensible_parts() -> None:
    assert PAIR.target_seconds == pytest.approx(14.1e-3, rel=1e-12)
    assert PAIR.draft_seconds == pytest.approx(1.8e-3, rel=1e-12)
    assert 0.5e-6 < FITTED.hop_seconds < 2e-6
    assert 0 < FITTED.fixed_seconds < 1.8e-3
    with pytest.raises(ParameterError, match="differ in depth"):
        fit(TARGET, replace(DRAFT, layers=80), TPUS, 1.0, 0.5)


def test_the_bandwidth_limit_lies_where_the_paper_says() -> None:
    """For HumanEval (5.73 ms) and greedy XSum (7.00), says Chen, it was exceeded; not for XSum with a nucleus (7.52)."""
    assert 7.00e-3 < forward(TARGET, TPUS).weights < 7.52e-3


def test_the_loop_of_figure_1_grows_by_a_little_more_than_the_drafts_time() -> None:
    steps = [PAIR.loop_seconds(k + 1) - PAIR.loop_seconds(k) for k in range(7)]
    assert all(1.8e-3 < step < 1.9e-3 for step in steps)


@given(alphas, gammas)
def test_a_small_batch_is_the_closed_form(alpha: float, gamma: int) -> None:
    """Where verifying costs what a token costs, Leviathan's Theorem 3.8 remains."""
    free = replace(PAIR, machine=replace(FITTED, speed=1e30, link=1e30))
    c = free.draft_seconds / free.target_seconds
    assert free.speedup(alpha, gamma) == pytest.approx(walltime_factor(alpha, gamma, c), rel=1e-9)
    assert free.best_gamma(alpha) == min(16, best_gamma(alpha, c))


@given(st.integers(1, 2000), st.integers(1, 2000), alphas)
def test_without_a_context_drafts_pay_less_in_larger_batches(first: int, second: int, alpha: float) -> None:
    small, large = sorted((first, second))
    gains = [replace(PAIR, rows=rows).speedup(alpha, 4) for rows in (small, large)]
    assert gains[0] >= gains[1] - 1e-9


def test_drafts_stop_paying_at_a_batch_and_not_before() -> None:
    for alpha in (0.6, 0.758, 0.888):
        rows = stops_paying(PAIR, alpha)
        assert rows is not None
        assert replace(PAIR, rows=rows).best_gamma(alpha) == 0
        assert replace(PAIR, rows=rows - 1).best_gamma(alpha) > 0
        assert balance(TARGET, FITTED) / 4 < rows < 4 * balance(TARGET, FITTED)


def test_a_long_context_pays_in_any_batch_since_the_cache_is_read_once_for_all_tokens() -> None:
    assert stops_paying(replace(PAIR, context=4096), 0.758) is None
    shared = replace(TARGET, cache_width=1024)
    assert forward(shared, FITTED, 4, 1, 100).cache == forward(TARGET, FITTED, 4, 1, 100).cache / 8


def test_the_command_prints_chens_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["theory", "scale", "--json"]) == 0
    got: dict[str, Any] = json.loads(capsys.readouterr().out)
    printed = {one["what"]: one for one in got["checks"]}
    assert printed["target, ms a token"]["ours"] == pytest.approx(14.1)
    assert got["lengths"][4]["loop_ms"] == pytest.approx(1000 * PAIR.loop_seconds(4), rel=1e-3)
    assert got["batches"]["stops"]["XSum"] == stops_paying(PAIR, got["alphas"]["XSum"])
    assert run(["theory", "scale"]) == 0
    assert "(fitted)" in capsys.readouterr().out


def test_another_set_up_has_no_printed_numbers_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["theory", "scale", "--devices", "1", "--tflops", "990", "--bandwidth", "4800", "--alpha", "0.7", "--json"]) == 0
    )
    got = json.loads(capsys.readouterr().out)
    assert got["checks"] == []
    assert got["parts"]["target"]["all_reduces"] == 0
    assert got["parts"]["target"]["weights"] == pytest.approx(140e9 / 4800e9 * 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "devices must be above 0"),
        (["--alpha", "2"], "alpha must be in"),
        (["--batch", "1,x"], "batch must be whole numbers"),
        (["--context", "-1"], "context must be 0 or more"),
        (["--fixed-ms", "-1"], "fixed_seconds must be 0 or more"),
        (["--all-reduce-us", "-5"], "all_reduce_us must be 0 or more"),
        (["--target-parameters", "inf"], "target_parameters must be below"),
    ],
)
def test_what_can_not_be_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["theory", "scale", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
