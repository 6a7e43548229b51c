"""Pages and figures: self-contained, the same bytes every time, escaped, and without complaint in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from outrider.cli.main import run
from outrider.errors import MissingPackageError
from outrider.report.page import DataTable, Page, Section, render
from outrider.report.plots import COLOURS, draw, standalone, style_sheet
from outrider.theory.figure_data import Curve, FigureData, Panel
from tests.helpers.chromium import CHROMIUM, browser
from tests.helpers.pages import check

PANEL = Panel("x", "y & <z>", (Curve("a", (0.0, 1.0, 2.0), (1.0, None, 3.0)), Curve("b", (1.0,), (2.0,), "points")), 1.0)
DATA = FigureData("small", "Title <1>", "source", "What “this” & that <shows>", (PANEL,))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages as the commands write them."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("figures", "tables")}
    for name, path in found.items():
        assert run(["theory", name, "--output", str(path)]) == 0
    return found


@pytest.mark.slow
def test_pages_load_nothing_and_run_nothing(pages: dict[str, Path]) -> None:
    for path in pages.values():
        html = path.read_text()
        checker = check(html)
        policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
        assert policy == [
            "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
        ]
        assert html.index("Content-Security-Policy") < html.index("<style>")
        assert checker.tags.count("h1") == 1
    assert pages["figures"].read_text().count("<svg") == 11


@pytest.mark.slow
def test_pages_are_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    chosen = ["theory", "figures", "--figure", "overlap", "--figure", "loop", "--output"]
    here, again = tmp_path / "here.html", tmp_path / "again.html"
    assert run([*chosen, str(here)]) == 0
    command = [sys.executable, "-m", "outrider", *chosen, str(again)]
    subprocess.run(command, check=True, capture_output=True)
    assert again.read_bytes() == here.read_bytes()
    assert not re.search(r"20\d\d-\d\d-\d\d", again.read_text()), "no date"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_pages_without_complaint(pages: dict[str, Path], scheme: str) -> None:
    """No console message, no request but the page itself, paper and ink as preferred, nothing wider than the window."""
    with browser() as window:
        for path in pages.values():
            window.open(path, width=700, dark=scheme == "dark")
            assert window.complaints == []
            assert window.requests == [path.resolve().as_uri()]
            paper = window.evaluate("getComputedStyle(document.body).backgroundColor")
            wanted = COLOURS["paper"][1 if scheme == "light" else 2]
            assert paper == "rgb({}, {}, {})".format(*bytes.fromhex(wanted[1:]))
            inks = {"rgb({}, {}, {})".format(*bytes.fromhex(COLOURS["ink"][1 if scheme == "light" else 2][1:]))}
            assert (
                set(window.evaluate("[...document.querySelectorAll('svg text')].map(e => getComputedStyle(e).fill)")) <= inks
            )
            assert window.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_what_a_page_may_not_do_is_blocked_and_seen(tmp_path: Path) -> None:
    """The policy works, and the check above would notice."""
    html = render(Page("t", ["here"], [], "c")).replace("here", '<img src="http://127.0.0.1:9/x.png"><script>1</script>')
    (tmp_path / "page.html").write_text(html)
    with browser() as window:
        window.open(tmp_path / "page.html")
        assert len([c for c in window.complaints if "Content Security Policy" in c]) == 2


def test_text_and_background_have_contrast() -> None:
    """WCAG: 4.5 to 1 for text and lines, on either paper; 4.5 for ink on the fills."""

    def luminance(colour: str) -> float:
        parts = [value / 255 for value in bytes.fromhex(colour[1:])]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for at in (1, 2):
        paper, ink = COLOURS["paper"][at], COLOURS["ink"][at]
        for name, colours in COLOURS.items():
            if name.startswith("series") or name == "ink":
                assert contrast(colours[at], paper) >= 4.5, (name, at)
            if name in ("accepted", "recovered", "bonus", "rejected", "neutral"):
                assert contrast(ink, colours[at]) >= 4.5, (name, at)


def test_whatever_is_no_figure_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    table = DataTable([evil], [[evil]])
    section = Section("s", evil, evil, [evil], table=table, folded=[(evil, table)])
    html = render(Page(evil, [evil], [section], evil))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 15, "every place, labels for readers of the screen included"
    check(html)


def test_a_figure_is_well_formed_and_says_what_it_shows() -> None:
    svg = draw(DATA)
    assert svg == draw(DATA)
    root = ET.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title") == DATA.title
    assert root.findtext(f"{space}desc") == DATA.text
    words = {"".join(text.itertext()) for text in root.iter(f"{space}text")}
    assert {"x", "y & <z>", "a", "b"} <= words
    assert all(element.get("id", "small").startswith("small") for element in root.iter())


def test_no_colour_is_fixed() -> None:
    """Each is a variable that the style sheet defines for both papers."""
    svg = draw(DATA)
    assert not re.search(r"#[0-9a-f]{6}", svg)
    used = set(re.findall(r"var\(--([\w-]+)\)", svg))
    assert used
    assert used <= set(COLOURS)
    sheet = style_sheet("svg")
    assert all(sheet.count(f"--{name}:") == 2 for name in COLOURS)


def test_a_file_of_its_own_has_its_own_style() -> None:
    text = standalone(draw(DATA), DATA.digest())
    root = ET.fromstring(text.split("\n", 1)[1])
    assert root.get("data-digest") == DATA.digest()
    assert float(root.get("width", "0")) > 100
    assert "prefers-color-scheme:dark" in text


def test_gaps_are_gaps() -> None:
    """A value that is None breaks the line instead of being drawn as something."""
    whole = FigureData("small", "", "", "", (Panel("x", "y", (Curve("a", (0.0, 1.0, 2.0), (1.0, 2.0, 3.0)),)),))
    holed = FigureData("small", "", "", "", (Panel("x", "y", (Curve("a", (0.0, 1.0, 2.0), (1.0, None, 3.0)),)),))
    lengths = []
    for data in (whole, holed):
        line = re.findall(r'id="small-line2d_\d+"><path d="([^"]+)"[^>]*var\(--series-0\)', draw(data))
        lengths.append([len(re.findall("L", path)) for path in line])
    assert lengths[0] == [2]
    assert lengths[1] == [] or max(lengths[1]) == 0


def test_a_folder_gets_figures_and_their_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert run(["theory", "figures", "--figure", "round", "--figure", "limits", "--output", str(folder)]) == 0
    assert "limits.csv" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == ["limits.csv", "limits.svg", "round.svg"]
    for path in folder.glob("*.svg"):
        ET.fromstring(path.read_text().split("\n", 1)[1])
    assert (folder / "limits.csv").read_text().startswith("figure,panel,curve,x,y\nlimits,")
    assert run(["theory", "figures", "--figure", "limits", "--output", str(tmp_path / "two"), "--format", "csv"]) == 0
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["limits.csv"]


def test_without_matplotlib_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"a figure needs the package matplotlib: run `pip install matplotlib`"):
        draw(DATA)
    assert run(["theory", "figures", "--json"]) == 0, "the data need none"
    assert run(["theory", "tables", "--output", str(tmp_path / "tables.html")]) == 0, "nor do the tables"
