"""The user's prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import ParameterError


def read_prompts(path: Path) -> list[str]:
    """JSON lines with "prompt", or plain text, one prompt a line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"prompts file {path} can't be read ({error}): name a text file or JSON lines") from None
    if not lines:
        raise ParameterError(f"prompts file {path} is empty: one prompt a line is wanted")
    if not lines[0].lstrip().startswith("{"):
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise ParameterError(f'prompts file {path}, line {number}: must be {{"prompt": text}}, got {line[:60]!r}')
        found.append(prompt)
    return found
