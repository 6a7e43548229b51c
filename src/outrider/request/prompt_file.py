"""The user's prompts from a file."""

from __future__ import annotations

from pathlib import Path

from outrider.audio import Audio, Recordings
from outrider.errors import ParameterError, why_unread
from outrider.support.tables import read_table


def read_prompts(path: Path) -> list[str | Audio]:
    """JSON lines with "prompt", or with "audio" for models that hear (see `audio`); or plain text, one prompt a line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"prompts file {path} can't be read ({why_unread(error)}): name a text file or JSON lines"
        ) from None
    if not lines:
        raise ParameterError(f"prompts file {path} is empty: one prompt a line is wanted")
    if not lines[0].lstrip().startswith("{"):
        return list(lines)
    recordings = Recordings(path.parent)
    prompts: list[str | Audio] = []
    for number, row in enumerate(read_table(path, lines=True), 1):
        where = f"prompts file {path}, prompt {number}"
        prompt = recordings.named_by(row, where) or row.get("prompt")
        if not isinstance(prompt, str | Audio) or not prompt:
            raise ParameterError(f'{where}: must be {{"prompt": text}} or {{"audio": FILE}}, got {prompt!r}')
        prompts.append(prompt)
    return prompts


def read_texts(path: Path) -> list[str]:
    """The same for what reads text alone."""
    prompts = read_prompts(path)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ParameterError(f'prompts file {path} must hold text, it has recordings ("audio"): leave them out')
    return texts
