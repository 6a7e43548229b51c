"""The measured report: of real logs of tiny models, every figure on it is one of theirs, gaps are named, nothing loads."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from outrider.cli.bench.choices import open_log
from outrider.cli.main import cli, run
from outrider.report.measured_leviathan import printed_alphas
from outrider.report.measured_logs import COMMANDS, read, short
from outrider.report.measured_trace import TOKENS, calls
from outrider.support.run_log import result_path
from outrider.theory.printed import tables
from tests.helpers.chromium import CHROMIUM, browser
from tests.helpers.folders import save_gpt2
from tests.helpers.pages import check

PARTS = ("chen-table-1", "leviathan-table-2", "leviathan-table-3", "leviathan-table-4")


def bench(*command: str) -> Result:
    result = CliRunner().invoke(cli, ["bench", *command])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def logs(target_folder: Path, draft_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A log of each command, small."""
    folder = tmp_path_factory.mktemp("logs")
    models = ["--target", str(target_folder), "--draft", str(draft_folder), "--dtype", "float64"]
    asked = [*models, "--task", "chat", "--prompts", "2", "--max-new-tokens", "10"]
    large, small = save_gpt2(folder / "large", 0, 2), save_gpt2(folder / "small", 1, 1)
    found = {kind: folder / f"{kind}.jsonl" for kind in COMMANDS}
    bench("sweep", *asked, "--lengths", "0-2", "--log", str(found["sweep"]))
    bench("tasks", *asked, "--metric", "perplexity", "--num-draft-tokens", "2", "--log", str(found["tasks"]))
    bench("alpha", *asked, "--log", str(found["alpha"]))
    gpt2 = ["--target", str(large), "--draft", str(small), "--dtype", "float64", "--total-tokens", "70"]
    bench("toyllm", *gpt2, "--repetitions", "2", "--log", str(found["toyllm"]))
    return found


@pytest.fixture(scope="module")
def page(logs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    result = bench("report", *map(str, logs.values()), "-o", str(out))
    assert result.stdout == f"written: {out}\n"
    assert "not measured" not in result.stderr
    return out


def section(page: Path, name: str) -> str:
    text = page.read_text()
    found = re.findall(rf'<section id="part-{name}".*?</section>', text, re.DOTALL)
    assert len(found) == 1, name
    return html.unescape(found[0])


def figures(log: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(result_path(log).read_text())
    return value


@pytest.mark.slow
def test_a_log_has_its_figures_beside_it_as_json_prints_them(logs: dict[str, Path], target_folder: Path) -> None:
    found = figures(logs["alpha"])
    models = ["--target", str(target_folder), "--draft", found["rows"][0]["draft"], "--dtype", "float64"]
    asked = ["--task", "chat", "--prompts", "2", "--max-new-tokens", "10", "--log", str(logs["alpha"])]
    assert json.loads(bench("alpha", *models, *asked, "--json").stdout) == found
    assert [figures(log)["bench"] for log in logs.values()] == list(logs)


def test_every_part_has_measured_and_printed_numbers(logs: dict[str, Path], page: Path) -> None:
    for row in figures(logs["tasks"])["rows"]:
        assert f"{row['ms_per_token']:.2f}" in section(page, "chen-table-1")
        assert short(row["drafting"]) in section(page, "chen-table-1")
        if row["speedup"]:
            assert f"{row['speedup']['median']:.2f}×" in section(page, "leviathan-table-2")
    for row in figures(logs["alpha"])["rows"]:
        assert f"{row['alpha']['value']:.3f} (" in section(page, "leviathan-table-3")
    for number, sweep in enumerate(figures(logs["sweep"])["sweeps"], 1):
        part = section(page, f"chen-figure-1-{number}")
        for row in sweep["rows"]:
            assert f"{row['ms_per_token']:.2f} ± {row['ms_deviation']:.2f}" in part
            assert all(f"{row['loop'][name]:.2f}" in part for name in ("mean", "p50", "p90", "p99"))
            made, took = row["predicted"], row["speedup"]["median"]
            if row["length"]:
                for value in (f"{made['closed_form']:.2f}×", f"{made['speedup']:.2f}×", f"{made['speedup'] / took:.2f}"):
                    assert value in section(page, "leviathan-table-4")
    ours = figures(logs["toyllm"])["ours"]
    assert f"{ours['speedup']['median']:.2f}×" in section(page, "toyllm-1")
    assert f"{ours['predicted_article'] / ours['speedup']['median']:.2f}" in section(page, "toyllm-1")
    # What the papers print.
    printed = {"chen-table-1": ("2.46×", "1.92×", "0.157", "47.0 %"), "leviathan-table-2": ("3.4×", "1.4×")}
    printed |= {
        "leviathan-table-3": ("0.89", "0.56", "LaMDA-8B"),
        "leviathan-table-4": ("3.2×", "2.6×"),
        "toyllm-1": ("2.12×", "16.82"),
    }
    for name, values in printed.items():
        assert all(value in section(page, name) for value in values), name


def test_their_table_3_agrees_with_their_table_4() -> None:
    alphas = {(task, draft, setting): alpha for _, task, draft, setting, alpha in printed_alphas()}
    assert len(alphas) == 2 * (3 + 5 + 5 + 3)
    for row in tables(["leviathan-4"])[0].rows:
        setting = "greedy" if row.given["temperature"] == "0" else "temperature 1, top-p 1"
        assert alphas[row.given["task"], row.given["draft"], setting] == row.given["α"]


def test_folders_are_named_by_their_last_part() -> None:
    assert short("/root/models/small, K = 4") == "…/small, K = 4"
    assert short("/a/b/one, /a/b/two:dtype=int8") == "…/one, …/two:dtype=int8"
    assert short("ngram:table=/a/b/c.ngram,order=2") == "ngram:table=…/c.ngram,order=2"
    for whole in ("Qwen/Qwen2.5-Coder-0.5B", "prompt-lookup, K = 4", "gpt2", "plain"):
        assert short(whole) == whole


def test_machine_versions_and_sample_sizes_are_told(logs: dict[str, Path], page: Path) -> None:
    about = section(page, "measured-on")
    found = figures(logs["sweep"])
    for name in ("processor", "torch", "transformers", "outrider"):
        assert found[name] in about
    assert "Not measured" not in about
    assert f'<td class="number">{2 * 2 * 3}</td>' in about, "runs of the sweep"


def test_the_trace_is_of_the_rounds_that_were_timed(logs: dict[str, Path], page: Path) -> None:
    (one,) = read([logs["sweep"]])
    part = section(page, "leviathan-figure-5-1")
    assert "K = 2" in part
    run = next(run for run in one.runs if run["length"] == 2)
    made = calls(run)
    assert sum(draft + rest for draft, rest, *_ in made) == pytest.approx(1000 * sum(r[3] for r in run["rounds"]))
    assert all(rest > 0 and (draft > 0) == (drafted > 0) for draft, rest, _, drafted in made)
    assert sum(kept for *_, kept, _ in made) == len(run["tokens"]) <= TOKENS
    assert all(draft == 0 for draft, *_ in calls(next(run for run in one.runs if run["length"] == 0)))


def test_what_is_not_measured_is_named_with_its_command(logs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "part.html"
    result = bench("report", str(logs["alpha"]), "--output", str(out), "--json")
    printed = json.loads(result.stdout)
    assert printed["written"] == str(out)
    assert set(printed["missing"]) == {"tasks", "sweep", "toyllm"}
    assert [one["figures"]["bench"] for one in printed["measured"]] == ["alpha"]
    assert "not measured: sweep: outrider bench sweep" in result.stderr
    for name in (*PARTS, "chen-figure-1-1", "leviathan-figure-5-1", "toyllm-1"):
        assert ("Not measured here: no log of it was given" in section(out, name)) == (name != "leviathan-table-3")
    assert "2.12×" in section(out, "toyllm-1"), "their numbers stand even so"
    check(out.read_text())


def test_the_commands_it_names_are_commands() -> None:
    for command in COMMANDS.values():
        words = command.split()
        assert words[:2] == ["outrider", "bench"]
        known = CliRunner().invoke(cli, [*words[1:3], "--help"]).output
        assert all(word in known for word in words if word.startswith("--"))


def test_a_log_that_was_not_ended_is_told_apart(logs: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(logs["sweep"].read_text().splitlines(keepends=True)[:4]))
    out = tmp_path / "cut.html"
    result = bench("report", str(cut), "-o", str(out))
    assert "not measured: sweep" in result.stderr
    assert "sweep (not ended)" in section(out, "measured-on")
    assert "has not been ended: run its command again" in section(out, "chen-figure-1-1")
    # The quickest K is shown, which one that is, is up to the machine, and the longest.
    assert "K = 2" in section(out, "leviathan-figure-5-1"), "what the rounds show does not need the end"


def test_figures_can_be_given_without_their_log(logs: dict[str, Path], tmp_path: Path) -> None:
    alone = tmp_path / "figures.json"
    alone.write_text(result_path(logs["sweep"]).read_text())
    out = tmp_path / "figures.html"
    bench("report", str(alone), "-o", str(out))
    assert "Theorem 3.8" in section(out, "leviathan-table-4")
    assert "Not shown: the sweeps given are figures without a log" in section(out, "leviathan-figure-5-1")
    both = read([logs["sweep"], result_path(logs["sweep"]), logs["sweep"]])
    assert [one.path for one in both] == [logs["sweep"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not there"),
        ("words\n", "line 1 is no JSON object"),
        ('{"settings": {"bench": "peers"}}\n', "is of bench peers: the report is made of tasks, sweep, alpha, toyllm"),
        ('{"contender": "ours"}\n', "does not say how it was made"),
    ],
)
def test_what_is_no_such_log_is_refused_in_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    log = tmp_path / "some.jsonl"
    if content is not None:
        log.write_text(content)
    result = CliRunner().invoke(cli, ["bench", "report", str(log), "-o", str(tmp_path / "x.html")])
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "x.html").exists()
    wrong = CliRunner().invoke(cli, ["bench", "report", "-o", str(tmp_path / "x.pdf")])
    assert "output must end in .html" in str(wrong.exception)


def test_the_page_is_the_same_bytes_again_and_loads_nothing(logs: dict[str, Path], page: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    bench("report", *map(str, logs.values()), "-o", str(again))
    assert again.read_bytes() == page.read_bytes()
    checker = check(page.read_text())
    assert checker.tags.count("svg") >= 6


def test_names_from_logs_are_escaped(logs: dict[str, Path], tmp_path: Path) -> None:
    evil = tmp_path / "evil.jsonl"
    evil.write_text(logs["sweep"].read_text())
    found = figures(logs["sweep"]) | {"target": "<script>alert(1)</script>", "task": '"><img src=x>'}
    result_path(evil).write_text(json.dumps(found))
    out = tmp_path / "evil.html"
    bench("report", str(evil), "-o", str(out))
    assert "<script" not in out.read_text()
    check(out.read_text())


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_shows_it_without_complaint(page: Path, tmp_path: Path) -> None:
    with browser() as window:
        for dark, width in ((False, 1200), (True, 700)):
            window.open(page, width=width, dark=dark)
            assert window.complaints == []
            assert window.requests == [page.resolve().as_uri()]
            assert window.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            assert window.evaluate("document.querySelectorAll('figure svg').length") >= 6


def test_figures_of_an_earlier_log_are_not_taken_for_those_of_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    result_path(path).write_text("{}")
    open_log(path, {"bench": "alpha"})
    assert not result_path(path).exists()


@pytest.mark.parametrize("content", ['{"bench": "tasks"}', '{"bench": "sweep", "sweeps": [{}]}', '{"bench": "toyllm"}'])
def test_figures_that_are_not_whole_are_one_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    path.write_text(content)
    assert run(["bench", "report", str(path), "-o", str(tmp_path / "r.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "r.html").exists()
