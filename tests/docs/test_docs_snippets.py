"""The documents can't go stale: quoted lines are in the source, links lead somewhere, examples print what they say.

A quotation is a Python block whose first line is `# src/outrider/FILE.py: NAME`; its further lines must be lines of that
function, in a row, where `…` stands for lines left out. Examples with `>>>` are run as doctests, page by page.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from outrider.cli.main import cli
from outrider.report.pictures import pictures
from outrider.theory.curves import MAKERS, figures
from outrider.theory.printed import MEANING, tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "docs" / name
    for name in ("how-it-works.md", "proof.md", "closed-forms.md", "any-function.md", "writing-a-drafter.md")
]
IDS = [page.name for page in PAGES]
LINKING = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "EXPERIMENTS.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"# ((?:src|examples)/\S+\.py): (\S+)")


def quotations() -> list[tuple[str, str, list[str]]]:
    """(file, function, lines) of every quotation."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            head, *lines = block.splitlines()
            if match := QUOTED.fullmatch(head):
                found.append((match[1], match[2], lines))
    return found


def source_lines(path: str, name: str) -> list[str]:
    """The stripped lines of a function or method in a file."""
    text = (ROOT / path).read_text()
    body: list[ast.stmt] = ast.parse(text).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((n for n in body if getattr(n, "name", None) == part), None)
        assert isinstance(node, ast.FunctionDef | ast.ClassDef), f"{path} has no {name}"
        body = node.body
    assert node is not None
    return [line.strip() for line in text.splitlines()[node.lineno - 1 : node.end_lineno]]


def contains(source: list[str], quoted: list[str]) -> bool:
    """Whether the quoted lines occur in order, those between two `…` in a row."""
    at = 0
    for part in "\n".join(line.strip() for line in quoted).split("…"):
        lines = part.strip("\n").splitlines()
        starts = [i for i in range(at, len(source) - len(lines) + 1) if source[i : i + len(lines)] == lines]
        if not starts:
            return False
        at = starts[0] + len(lines)
    return True


@pytest.mark.parametrize(("path", "name", "lines"), quotations(), ids=lambda value: value if isinstance(value, str) else "")
def test_quoted_lines_are_in_the_source(path: str, name: str, lines: list[str]) -> None:
    assert lines
    assert contains(source_lines(path, name), lines), f"{name} in {path} no longer has the lines quoted in the documents"


def test_a_quotation_that_went_stale_is_seen() -> None:
    path, name, lines = next(q for q in quotations() if q[1] == "_accepted")
    source = source_lines(path, name)
    assert not contains(source, [lines[0].replace("target[", "draft["), *lines[1:]])
    assert not contains(source, lines[::-1])
    assert not contains(source[:-1], lines)


def test_every_python_block_is_a_quotation_or_an_example() -> None:
    """Otherwise nothing would check it."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            assert QUOTED.match(block) or block.startswith(">>>"), block


@pytest.mark.parametrize(("name", "least"), [("how-it-works.md", 5), ("proof.md", 8), ("any-function.md", 12)])
def test_examples_print_what_they_say(name: str, least: int) -> None:
    page = ROOT / "docs" / name
    examples = "\n".join(block for block in BLOCK.findall(page.read_text()) if block.startswith(">>>"))
    test = doctest.DocTestParser().get_doctest(examples, {}, page.name, str(page), 0)
    assert len(test.examples) >= least
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """`folder/file.py` in the checkout, the package or the tests."""
    named = re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)+\.(?:py|cpp|h|sh))", page.read_text())
    missing = {path for path in named if not any((ROOT / top / path).exists() for top in (".", "src/outrider", "tests"))}
    assert not missing


@pytest.mark.parametrize("page", [page for page in LINKING if page.name != "EXPERIMENTS.md"], ids=lambda page: page.name)
def test_modules_that_are_named_exist(page: Path) -> None:
    """`folder/module`, and `folder/module.name`, of the package. Experiments may name what has gone since."""
    source = ROOT / "src" / "outrider"
    folders = "|".join(sorted({folder.name for folder in source.rglob("*") if folder.is_dir()}))
    named = set(re.findall(rf"`((?:{folders})/[a-z_0-9/]*[a-z_0-9])(?:\.(?!py)\w+)?`", page.read_text()))
    places = (source, source / "models")
    assert not {path for path in named if not any(list(top.glob(f"{path}*")) for top in places)}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Files exist; anchors are headings; a link whose text is code names something in the linked Python file."""
    for text, target in re.findall(r"\[([^\]]+)\]\(((?!https:)[^)]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings], target
        name = text.strip("`")
        if text.startswith("`") and path.suffix == ".py" and not name.endswith(".py"):
            module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
            assert module.endswith(name) or re.search(
                rf"^(def|class) {re.escape(name)}\b", path.read_text(), re.MULTILINE
            ), text


def test_tests_that_the_documents_name_exist() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    every = "\n".join(files.values())
    for page in PAGES:
        for name in set(re.findall(r"`(test_\w+)`", page.read_text())):
            assert f"def {name}(" in every or name in files, name


def test_the_summary_of_the_printed_numbers_is_todays() -> None:
    text = (ROOT / "docs" / "closed-forms.md").read_text()
    for table in tables():
        assert f"| {table.summary()} |" in text, table.name
    assert all(f"*{name}*" in " ".join(text.split()) for name in MEANING)


def test_every_figure_is_named_in_the_documents() -> None:
    text = (ROOT / "docs" / "closed-forms.md").read_text()
    assert all(f"`{name}`" in text for name in [*MAKERS, *pictures()])


def test_committed_pictures_are_of_todays_numbers() -> None:
    """By the fingerprint of the data, which does not depend on matplotlib's version."""
    drawn = {picture.name: picture.digest() for picture in pictures().values()}
    committed = sorted((ROOT / "docs" / "images").glob("*.svg"))
    for path in committed:
        digest = drawn[path.stem] if path.stem in drawn else figures([path.stem])[0].digest()
        assert f'data-digest="{digest}"' in path.read_text(), f"{path.name} is old: see docs/how-it-works.md, The pictures"
    shown = {name for page in PAGES for name in re.findall(r"\(images/([\w-]+)\.svg\)", page.read_text())}
    assert shown == {path.stem for path in committed}
    command = (ROOT / "docs" / "how-it-works.md").read_text()
    assert shown == set(re.findall(r"--figure ([\w-]+)", command.split("## The pictures")[1]))


def layers(page: str) -> dict[str, int]:
    """The level of every part that the table of design.md names, the highest 0."""
    block = page.split("one exception", 1)[1].split("\n\n", 2)[1]
    rows = [re.split(r" {3,}", line.strip())[0].split() for line in block.splitlines()]
    return {part.rstrip("/"): level for level, row in enumerate(rows) for part in row}


def upward_imports(level: dict[str, int]) -> set[tuple[str, str]]:
    """(part, the part that it imports), where the second is above the first."""
    found = set()
    for path in (ROOT / "src" / "outrider").rglob("*.py"):
        part = path.relative_to(ROOT / "src" / "outrider").parts[0].removesuffix(".py")
        for name in re.findall(r"^ *(?:from|import) outrider(?:\.| import )(\w+)", path.read_text(), re.MULTILINE):
            if part in level and level.get(name, len(level)) < level[part]:
                found.add((part, name))
    return found


def test_imports_point_downwards_but_for_the_named_exception() -> None:
    level = layers((ROOT / "docs" / "design.md").read_text())
    package = ROOT / "src" / "outrider"
    parts = {path.relative_to(package).parts[0].removesuffix(".py") for path in package.rglob("*.py")}
    assert set(level) == parts - {"__init__", "__main__"}
    assert upward_imports(level) == {("compare", "audit")}


def test_an_upward_import_is_seen() -> None:
    level = layers((ROOT / "docs" / "design.md").read_text())
    assert ("generation", "decode") in upward_imports({**level, "decode": -1})


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Modules that import each other, by whatever way."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph.get(waiting.pop(), set()) - found:
                found.add(name)
                waiting.append(name)
        return found

    reach = {name: reached(name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in graph if name in reach[name]
    }


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of ours that a module imports, inside of functions, too, but not for its annotations alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("outrider"):
            yield from (f"{child.module}.{name.name}" for name in child.names)
            yield child.module or ""
        yield from imported(child)


def test_modules_do_not_import_each_other_in_circles() -> None:
    """But for a team's own `load`, which is a short cut to what uses teams."""
    source = ROOT / "src"
    files = {
        ".".join(path.relative_to(source).with_suffix("").parts): path
        for path in source.rglob("outrider/**/*.py")
        if path.name != "__init__.py"  # which hands out what is beside it
    }
    graph = {name: set(imported(ast.parse(path.read_text()))) & files.keys() for name, path in files.items()}
    assert sum(map(len, graph.values())) > 1000
    found = circles(graph)
    assert found == {frozenset(f"outrider.sharded.{name}" for name in ("loading", "model", "placement", "team"))}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}


SECTIONS = (
    *("2.2", "2.3", "3.1", "3.2", "3.3, Theorem", "3.3, Corollary 3.9", "3.4", "3.5", "3.6", "4.1", "4.2", "5 |", "6 |"),
    *("A.1", "A.2", "A.3", "A.4", "A.5", "Figure 1", "Figure 4", "Figure 5", "Algorithm 1", "Algorithm 2", "Conditional"),
    *("Theorem 1", "choice of draft", "Results", "Table 1", "acceptance changes", "distillation", "together with", "14.1"),
)


def test_the_table_of_the_papers_has_every_section_and_no_bare_pointers() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition("## What grew")[0].splitlines() if line.startswith("| ")]
    for section in SECTIONS:
        assert any(row.startswith(f"| {section}") for row in rows), section
    for row in rows:
        gave = row.rstrip(" |").rpartition(" | ")[2].strip()
        assert gave, row
        assert not re.fullmatch(r"\[[^]]*\]\([^)]*\)", gave), row


def test_the_table_of_the_papers_names_tests_and_commands_that_exist() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(test_\w+)\.py(?:::(\w+))?`", text)
    assert len(named) > 40
    for module, test in named:
        assert module in sources, module
        assert not test or f"def {test}(" in sources[module], (module, test)
    for line in re.findall(r"`outrider ([a-z][\w -]*)", text):
        command: click.Command = cli
        for word in line.split():
            if word.startswith("-") or not isinstance(command, click.Group):
                break
            assert word in command.commands, line
            command = command.commands[word]
