"""Messages of what Python users meet name parameters and values, not the command line's options."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider

PACKAGE = Path(outrider.__file__).parent
LIBRARY = ("acceptance", "beam", "decode", "drafters", "draft_length", "heads", "models", "request", "round", "sampling")
COMMANDS = ("pip install", "outrider train-ngram", "torchrun")
OPTION = re.compile(r"(?:^|[\s(`])--[a-z]")


def said(path: Path) -> Iterator[str]:
    """Strings of a module that are no docstrings, those in parts put together."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    shown = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in shown:
            yield node.value


@pytest.mark.parametrize("folder", LIBRARY)
def test_no_options_of_the_command_line_are_named(folder: str) -> None:
    found = {
        (path.name, text)
        for path in (PACKAGE / folder).rglob("*.py")
        for text in said(path)
        if OPTION.search(text) and not any(command in text for command in COMMANDS)
    }
    assert found == set()
