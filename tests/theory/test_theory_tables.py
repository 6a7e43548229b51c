"""Closed forms beside the numbers of others: every row of the notes and the papers, the commands, the curves."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from outrider import theory
from outrider.cli.main import run
from outrider.errors import ParameterError
from outrider.theory.advice import advise, in_words
from outrider.theory.curves import MAKERS, figures
from outrider.theory.printed import MEANING, Row, tables


def cells(text: str) -> list[str]:
    return text.split()


# The notes (speculative-decoding-notes.zh.md), transcribed a second time, as they stand: α | K | tokens.
NOTES_TOKENS = cells("""
0.1|3|1.111 0.1|4|1.111 0.1|5|1.111 0.1|6|1.111 0.1|7|1.111 0.1|8|1.111 0.1|9|1.111
0.3|3|1.417 0.3|4|1.425 0.3|5|1.427 0.3|6|1.428 0.3|7|1.428 0.3|8|1.428 0.3|9|1.428
0.5|3|1.875 0.5|4|1.937 0.5|5|1.968 0.5|6|1.984 0.5|7|1.992 0.5|8|1.996 0.5|9|1.998
0.7|3|2.532 0.7|4|2.773 0.7|5|2.941 0.7|6|3.058 0.7|7|3.141 0.7|8|3.198 0.7|9|3.239
0.8|3|2.952 0.8|4|3.361 0.8|5|3.689 0.8|6|3.951 0.8|7|4.161 0.8|8|4.328 0.8|9|4.463
""")
# α | K | c | speed-up
NOTES_SPEED = cells("""
0.5|3|0.01|1.820 0.5|3|0.05|1.630 0.5|4|0.01|1.862 0.5|4|0.05|1.614
0.5|5|0.01|1.875 0.5|5|0.05|1.575 0.5|6|0.01|1.872 0.5|6|0.05|1.526
0.6|3|0.01|2.112 0.6|3|0.05|1.892 0.6|4|0.01|2.216 0.6|4|0.05|1.921
0.6|5|0.01|2.269 0.6|5|0.05|1.906 0.6|6|0.01|2.292 0.6|6|0.05|1.869
0.7|3|0.01|2.459 0.7|3|0.05|2.202 0.7|4|0.01|2.666 0.7|4|0.05|2.310
0.7|5|0.01|2.801 0.7|5|0.05|2.352 0.7|6|0.01|2.885 0.7|6|0.05|2.352
0.8|3|0.01|2.866 0.8|3|0.05|2.566 0.8|4|0.01|3.232 0.8|4|0.05|2.801
0.8|5|0.01|3.513 0.8|5|0.05|2.951 0.8|6|0.01|3.727 0.8|6|0.05|3.039
""")
# Leviathan Table 4: γ | α | c | Exp
TABLE_4 = cells("""
7|0.75|0.02|3.2 7|0.80|0.04|3.3 7|0.82|0.11|2.5 7|0.62|0.02|2.3 5|0.68|0.04|2.4 3|0.71|0.11|2.0
5|0.65|0.02|2.4 5|0.73|0.04|2.6 3|0.74|0.11|2.0 5|0.53|0.02|1.9 3|0.55|0.04|1.8 3|0.56|0.11|1.6
""")


@pytest.mark.parametrize("row", NOTES_TOKENS)
def test_expected_tokens_of_the_notes(row: str) -> None:
    """Cut off after three digits, hence at most 0.001 below ours; 0.7|3 is 2.533, printed as 2.532."""
    alpha, gamma, printed = row.split("|")
    assert -1e-12 <= theory.expected_tokens(float(alpha), int(gamma)) - float(printed) < 0.001 + 1e-12


@pytest.mark.parametrize("row", NOTES_SPEED)
def test_walltime_factors_of_the_notes(row: str) -> None:
    alpha, gamma, c, printed = row.split("|")
    assert -1e-12 <= theory.walltime_factor(float(alpha), int(gamma), float(c)) - float(printed) < 0.001


def test_the_tables_hold_the_notes_as_they_stand() -> None:
    """Transcribed twice, so that a slip shows."""
    by_name = {table.name: table for table in tables()}
    tokens = ["|".join((*row.given.values(), row.theirs)) for row in by_name["notes-tokens"].rows]
    assert tokens == NOTES_TOKENS
    assert ["|".join((*row.given.values(), row.theirs)) for row in by_name["notes-speed"].rows] == NOTES_SPEED
    rows = by_name["leviathan-4"].rows
    assert ["|".join((row.given["γ"], row.given["α"], row.given["c"], row.theirs)) for row in rows] == TABLE_4


def test_the_notes_truncate_and_the_papers_round() -> None:
    verdicts = {table.name: [row.verdict for row in table.rows] for table in tables()}
    for name in ("notes-tokens", "notes-speed"):
        assert set(verdicts[name]) <= {"truncated", "either", "floating point"}
    assert verdicts["notes-tokens"].count("truncated") == 9
    assert verdicts["notes-speed"].count("truncated") == 15
    assert set(verdicts["leviathan-1"]) == {"rounded", "either"}
    assert "truncated" not in {
        verdict for name, found in verdicts.items() if not name.startswith("notes") for verdict in found
    }


def test_the_one_row_that_floating_point_spoilt() -> None:
    spoilt = [row for table in tables() for row in table.rows if row.verdict == "floating point"]
    assert [(row.given, row.theirs) for row in spoilt] == [({"α": "0.7", "K": "3"}, "2.532")]
    assert spoilt[0].ours == 2.533
    assert (1 - 0.7**4) / (1 - 0.7) < 2.533


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row({}, "", 1.9375, "1.937"), "truncated"),
        (Row({}, "", 1.9375, "1.938"), "rounded"),
        (Row({}, "", 1.9372, "1.937"), "either"),
        (Row({}, "", 1.9372, "1.936"), "differs"),
        (Row({}, "", 1.9372, "1.938"), "differs"),
        (Row({}, "", 2.0 - 4e-16, "2.0"), "either"),
        (Row({}, "", 2.533, "2.532", as_written=2.5329999999999995), "floating point"),
        (Row({}, "", 2.533, "2.531", as_written=2.5329999999999995), "differs"),
        (Row({}, "", 2.35, "2.4", reach=(2.2, 2.42)), "rounded"),
        (Row({}, "", 2.34, "2.4", reach=(2.2, 2.42)), "inputs rounded"),
        (Row({}, "", 2.34, "2.5", reach=(2.2, 2.42)), "differs"),
    ],
)
def test_verdicts_on_planted_rows(row: Row, verdict: str) -> None:
    assert row.verdict == verdict


def test_a_prediction_with_quantized_inputs_is_within_their_reach() -> None:
    """By brute force over α and c that would be printed so."""
    for row in next(table for table in tables() if table.name == "leviathan-4").rows:
        assert row.reach is not None
        alpha, c, gamma = float(row.given["α"]), float(row.given["c"]), int(row.given["γ"])
        steps = [i / 100 - 0.5 for i in range(101)]
        values = [theory.walltime_factor(alpha + 0.01 * a, gamma, c + 0.01 * b) for a, b in itertools.product(steps, steps)]
        assert row.reach == pytest.approx((min(values), max(values)))


def test_no_draft_length_gives_what_a_5_prints_at_temperature_1() -> None:
    for alpha, printed in ((0.625, 2.45), (0.715, 3.05), (0.765, 3.55)):
        assert max(theory.walltime_factor(alpha, gamma, 0.0145) for gamma in range(200)) < printed


def test_every_formula_of_the_design() -> None:
    """Its check values are Table 1, in test_theory; here the forms as it writes them."""
    for alpha, gamma, c in itertools.product((0.05, 0.4, 0.83), (0, 1, 3, 9), (0.0, 0.07, 0.6)):
        geometric = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert theory.expected_tokens(alpha, gamma) == pytest.approx(geometric)
        assert theory.walltime_factor(alpha, gamma, c) == pytest.approx(geometric / (gamma * c + 1))
        assert theory.operations_factor(alpha, gamma, c) == pytest.approx((gamma * c + gamma + 1) / geometric)
        verify = {1: 2.0, gamma + 1: 2.0 + 0.3 * gamma}
        wanted = geometric * 2.0 / (gamma * 0.1 + 2.0 + 0.3 * gamma)
        assert theory.measured_speedup(alpha, gamma, 0.1, verify) == pytest.approx(wanted)
        assert theory.efficiency(alpha, gamma) == pytest.approx(geometric / (gamma + 1))
        if alpha > c:
            assert theory.walltime_factor(alpha, theory.best_gamma(alpha, c), c) >= (1 + alpha) / (1 + c) - 1e-12
    target, draft = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert float(theory.d_lk(target, draft)) == pytest.approx(0.4)
    assert float(theory.lenient_acceptance_probability(target, draft, 0.5)) == pytest.approx(0.2 + 0.2 + 0.4)


@pytest.mark.parametrize("gamma", [1, 4, 12])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.888, 1.0])
def test_alpha_is_found_again_from_tokens_per_round(alpha: float, gamma: int) -> None:
    assert theory.alpha_from_tokens(theory.expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha, abs=1e-9)


def test_limits_of_long_drafts() -> None:
    assert theory.limit_tokens(0.75) == 4.0
    assert theory.expected_tokens(0.75, 200) == pytest.approx(4.0)
    assert theory.limit_tokens(1.0) == math.inf
    for tokens, gamma in ((0.9, 4), (5.1, 4), (1.0, 0)):
        with pytest.raises(ParameterError, match="tokens"):
            theory.alpha_from_tokens(tokens, gamma)
    with pytest.raises(ParameterError, match="draft_seconds"):
        theory.loop_seconds(3, -1.0, 1.0)


def test_curves_are_the_formulas() -> None:
    """Spot values of every figure, computed here from the definitions."""
    points = {(f, p, c, round(x, 6)): y for data in figures() for f, p, c, x, y in data.rows()}
    assert points["tokens", "tokens per round", "γ = 3", 0.7] == pytest.approx(2.533)
    assert points["tokens", "tokens per round", "unlimited", 0.9] == pytest.approx(10.0)
    assert points["best-gamma", "best γ", "c = 0.05", 0.8] == 8.0
    assert points["best-gamma", "best γ", "c = 0.2", 0.2] == 0.0
    assert points["trade-off", "operations factor", "γ = 10", 0.9] == pytest.approx(11 / ((1 - 0.9**11) / 0.1))
    assert points["at-best-gamma", "speed-up", "c = 0.05", 0.8] == pytest.approx((1 - 0.8**9) / 0.2 / 1.4)
    assert points["oracle", "speed-up", "oracle, c = 0.1", 0.5] == pytest.approx(1 / 0.55)
    assert points["loop", "tokens per round / (K + 1)", "HumanEval, α = 0.89", 4.0] == pytest.approx(0.8)
    assert points["loop", "ms per round", "14.1 + 1.8 K", 7.0] == pytest.approx(26.7)
    assert points["loop", "ms for 128 tokens", "XSum, measured", 4.0] == pytest.approx(962.56)
    assert points["limits", "speed-up, growing verification", "+ 100 %", 4.0] == pytest.approx(3.3616 / 5.2)
    assert points["rules", "probability", "distance from the target, α_l − α", 1.0] == pytest.approx(0.0, abs=1e-12)
    assert all(y is None or math.isfinite(y) for y in points.values())


def test_the_oracle_gains_up_to_about_sixty_percent() -> None:
    gains = [y for _, panel, _, _, y in figures(["oracle"])[0].rows() if panel.startswith("gain") and y is not None]
    assert min(gains) >= 0.0
    assert 50.0 < max(gains) < 60.0


def test_no_rule_accepts_more_than_the_ratio_rule() -> None:
    panel = figures(["rules"])[0].panels[0]
    ratio, race, match, itself, rejection = panel.curves
    for best, *others in zip(ratio.y, race.y, match.y, rejection.y, strict=True):
        assert best is not None
        assert others[0] >= best / (2.0 - best)  # type: ignore[operator]
        assert all(other is not None and other <= best for other in others)
    assert ratio.y[0] is not None
    assert match.y[0] == pytest.approx(ratio.y[0], abs=1e-4), "at temperature 0 the rules are one"
    at_one = panel.curves[0].x.index(1.0)
    assert match.y[at_one] is not None
    assert itself.y[at_one] is not None
    assert match.y[at_one] < itself.y[at_one] < 0.5 < ratio.y[at_one]  # type: ignore[operator]


def test_figures_are_the_same_every_time() -> None:
    assert [data.digest() for data in figures()] == [data.digest() for data in figures()]
    assert len({data.digest() for data in figures()}) == len(MAKERS)


def test_advice_is_the_closed_forms() -> None:
    advice = advise(0.8, 0.05, gamma=3)
    assert (advice.chosen.gamma, advice.best_gamma) == (3, 8)
    assert advice.chosen.tokens == pytest.approx(2.952)
    assert advice.best.walltime_factor == pytest.approx(3.0920795)
    assert advice.guaranteed == pytest.approx(1.8 / 1.05)
    assert advice.oracle == pytest.approx(1 / 0.24)
    assert [line.gamma for line in advice.lines] == list(range(11))
    words = " ".join(in_words(advice))
    for said in ("α = 0.8", "γ = 3: 2.952 tokens", "2.567× as fast", "γ = 8: 4.329", "1.714×", "= 5.000", "35 % above"):
        assert said in words, said


@pytest.mark.parametrize(
    ("alpha", "c", "said"),
    [
        (0.3, 0.5, "No draft length helps"),
        (0.9, 2.0, "Not even an oracle"),
        (1.0, 0.0, "gain without bound"),
        (1.0, 0.5, "no limit"),
        (0.9, 0.0, "64 is the longest length considered"),
    ],
)
def test_advice_at_the_edges(alpha: float, c: float, said: str) -> None:
    assert said in " ".join(in_words(advise(alpha, c)))
    json.dumps(advise(alpha, c).to_dict(), allow_nan=False)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["theory", *arguments]) == 0
    return capsys.readouterr().out


def test_explain_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "explain", "--alpha", "0.9", "--c", "0.01")
    assert re.search(r"^ 24 .* best$", text, re.MULTILINE), "the best is shown though it is beyond γ = 10"
    out = shown(capsys, "explain", "--alpha", "0.8", "--c", "0.05", "--gamma", "2", "--c-hat", "0.2", "--json")
    assert out.count("\n") == 1
    got = json.loads(out)
    assert got["chosen"]["operations_factor"] == pytest.approx((2 * 0.2 + 3) / 2.44)
    assert got["best_gamma"] == 8
    assert len(got["lines"]) == 11


def test_tables_as_text_csv_and_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "tables")
    got = json.loads(shown(capsys, "tables", "--json"))
    rows = list(csv.DictReader(io.StringIO(shown(capsys, "tables", "--csv"))))
    flat = [(table["name"], row) for table in got["tables"] for row in table["rows"]]
    assert len(rows) == len(flat) == sum(len(table.rows) for table in tables()) == 106
    for (name, row), line in zip(flat, rows, strict=True):
        assert (name, row["theirs"], row["verdict"]) == (line["table"], line["theirs"], line["verdict"])
        assert float(line["ours"]) == row["ours"]
        assert float(line["difference"]) == pytest.approx(row["ours"] - float(row["theirs"]))
        assert f"{row['ours']:.5f}" in text
    assert got["meaning"] == MEANING
    assert all(table["summary"] in text for table in got["tables"])
    assert [table["name"] for table in json.loads(shown(capsys, "tables", "--table", "chen-1", "--json"))["tables"]] == [
        "chen-1"
    ]


def test_figure_data_as_csv_and_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    got = json.loads(shown(capsys, "figures", "--figure", "limits", "--figure", "round", "--json"))
    assert [figure["name"] for figure in got["figures"]] == ["limits", "round"]
    assert got["figures"][1]["numbers"]["recovered"] == "purred"
    lines = list(csv.DictReader(io.StringIO(shown(capsys, "figures", "--figure", "limits", "--csv"))))
    points = [
        (panel["y_label"], curve["label"], x, y)
        for panel in got["figures"][0]["panels"]
        for curve in panel["curves"]
        for x, y in zip(curve["x"], curve["y"], strict=True)
    ]
    assert [(line["panel"], line["curve"], float(line["x"]), float(line["y"])) for line in lines] == points


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--alpha", "1.2", "--c", "0"], "alpha must be in [0, 1], got 1.2"),
        (["explain", "--alpha", "nan", "--c", "0"], "alpha must be"),
        (["explain", "--alpha", "0.5", "--c", "-1"], "c must be finite and 0 or more"),
        (["explain", "--alpha", "0.5", "--c", "inf"], "c must be finite and 0 or more"),
        (["explain", "--alpha", "0.5", "--c", "0.1", "--c-hat", "-1"], "c_hat must be"),
        (["explain", "--alpha", "0.5", "--c", "0.1", "--gamma", "65"], "gamma must be in 0 … 64, got 65"),
        (["explain", "--alpha", "0.5", "--c", "0.1", "--gamma", "-1"], "gamma must be in 0 … 64, got -1"),
        (["explain", "--alpha", "0.5"], "Missing option"),
        (["tables", "--table", "x"], "table must be one of leviathan-1"),
        (["tables", "--csv", "--json"], "exclude each other"),
        (["tables", "--output", "tables.txt"], "output must end in .html"),
        (["tables", "--output", "/nowhere/tables.html"], "there is no folder /nowhere"),
        (["figures", "--figure", "x"], "figure must be one of round"),
        (["figures", "--csv", "--json"], "exclude each other"),
        (["figures", "--output", "figures.png"], "output must be a folder, or a file that ends in .html"),
        (["figures", "--output", "/nowhere/figures.html"], "there is no folder /nowhere"),
        (["figures", "--output", "/proc/x/y"], "can't be made: "),
        (["figures", "--format", "svg"], "format is for folders"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["theory", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("outrider: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("mine")
    assert run(["theory", "figures", "--output", str(tmp_path / "taken")]) == 2
    assert "can't be made: " in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"
