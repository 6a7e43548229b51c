"""Text that can be had anywhere Outrider runs: code, docstrings and descriptions of the installed Python packages.

Only packages under permissive licences, which are written beside the text.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from random import Random

from outrider.errors import ParameterError

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|HPND|Zlib|Unlicense)\b", re.IGNORECASE)
SHORTEST = 300  # characters of a docstring
FILE_BYTES = 200_000  # larger files are tables or generated
_SKIPPED = re.compile(r"(^|/)(tests?|testing|_vendor|vendor)(/|$)")


@dataclass(frozen=True)
class Text:
    """kind: "code" or "docs"; source: "package/file"."""

    kind: str
    source: str
    licence: str
    text: str


def collect(folder: Path, characters: int) -> dict[str, int]:
    """Write `code.jsonl` and `docs.jsonl` of at most so many characters each, and `licences.json`. → characters by file

    Packages are drawn from in turn, so that no large one fills it all; the same packages give the same text.
    """
    queues = [iter(_texts(name, licence, files)) for name, licence, files in _packages()]
    found: dict[str, list[Text]] = {"code": [], "docs": []}
    sizes = dict.fromkeys(found, 0)
    while queues and min(sizes.values()) < characters:
        for queue in list(queues):
            text = next(queue, None)
            if text is None:
                queues.remove(queue)
            elif sizes[text.kind] < characters:
                found[text.kind].append(text)
                sizes[text.kind] += len(text.text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, texts in found.items():
            lines = [json.dumps({"text": text.text, "source": text.source}) for text in texts]
            (folder / f"{kind}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        licences = {text.source.partition("/")[0]: text.licence for texts in found.values() for text in texts}
        (folder / "licences.json").write_text(json.dumps(dict(sorted(licences.items())), indent=1) + "\n")
    except OSError as error:
        raise ParameterError(f"text can't be written to {folder} ({error.strerror}): name another folder") from None
    return sizes


def _packages() -> Iterator[tuple[str, str, list[Path]]]:
    """Name, licence and Python files of each package under a permissive licence, the standard library first."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = ("site-packages", "test", "idlelib", "lib2to3")
    yield "python", "PSF-2.0", [f for f in sorted(library.rglob("*.py")) if not set(skipped) & set(f.parts)]
    for package in sorted(distributions(), key=lambda one: one.name):
        licence = _licence(package)
        if licence and package.name != "outrider":
            files = [Path(str(package.locate_file(file))) for file in package.files or () if str(file).endswith(".py")]
            yield package.name, licence, files


def _licence(package: Distribution) -> str | None:
    data = package.metadata
    said = [*(data.get_all("License-Expression") or ()), *(data.get_all("License") or ())]
    classified = [text for text in data.get_all("Classifier") or () if text.startswith("License")]
    named = [text.splitlines()[0][:80] for text in (*said, *classified) if text]
    joined = "; ".join(named)
    return joined if PERMISSIVE.search(joined) and not re.search(r"\bA?L?GPL", joined) else None


def _texts(name: str, licence: str, files: list[Path]) -> Iterator[Text]:
    """Files in an order of their own, each as code and, apart, its longer docstrings."""
    files = sorted(files)
    Random(f"0 {name}").shuffle(files)
    for file in files:
        if _SKIPPED.search(str(file)):
            continue
        try:
            text = file.read_text(encoding="utf-8") if file.stat().st_size <= FILE_BYTES else ""
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) < SHORTEST:
            continue
        yield Text("code", f"{name}/{file.name}", licence, text)
        documents = _docstrings(text)
        if documents:
            yield Text("docs", f"{name}/{file.name}", licence, "\n\n".join(documents))


def _docstrings(text: str) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old code
            nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
    return [one for one in found if one and len(one) >= SHORTEST]
