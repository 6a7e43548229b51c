"""What an audit is given by its user, read without torch: prompts, lines of outputs, fields of requests to a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import ParameterError, why_unread

PROMPTS = (
    "def quicksort(items):\n",
    "The history of the bicycle begins in",
    "Dear Dr. Novak,\n\nThank you for your letter about",
    "1, 2, 4, 8, 16,",
    "Q: Why is the sky blue?\nA:",
    "import json\n\n\nclass Settings:\n",
    "Once upon a time, in a village by the sea,",
    "| name | age | city |\n|---|---|---|\n| Ann |",
    "La recette de la ratatouille :\n",
    "SELECT name, COUNT(*) FROM orders",
    "To be, or not to be, that is the question:",
    "Abstract. We show that every finite group of",
    "<html>\n<head>\n<title>",
    "MINUTES OF THE MEETING\n\nPresent:",
    "What I learned from ten years of gardening is",
    "Error: expected ';' before '}' token\n",
)
"""Beginnings of different kinds of text, none of which fixes how it goes on."""


def read_lines(path: Path) -> list[str]:
    """Of such a file, or `ParameterError`."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"outputs file {path} can't be read ({why_unread(error)}): name a file of JSON lines") from None


def parse_extra(text: str | None) -> dict[str, Any]:
    """The further fields as JSON."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ParameterError(f"extra must be a JSON object, got {text!r}")
    return found
