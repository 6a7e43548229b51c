"""The user's prompts from a file."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ParameterError
from outrider.tables import read_table


def read_prompts(path: Path) -> list[str]:
    """JSON lines with "prompt", or plain text, one prompt a line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"prompts file {path} can't be read ({error}): name a text file or JSON lines") from None
    if not lines:
        raise ParameterError(f"prompts file {path} is empty: one prompt a line is wanted")
    if not lines[0].lstrip().startswith("{"):
        return lines
    prompts = [row.get("prompt") for row in read_table(path, lines=True)]
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str) or not prompt:
            raise ParameterError(f'prompts file {path}, prompt {number}: must be {{"prompt": text}}, got {prompt!r}')
    return [str(prompt) for prompt in prompts]
