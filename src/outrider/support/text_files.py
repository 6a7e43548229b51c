"""Which files of a folder are text."""

from __future__ import annotations

from pathlib import Path

LOOKED_AT = 1 << 16  # bytes of a file
MOSTLY = 0.1  # of them may not be UTF-8: texts in other encodings have some, pictures half


def is_text(path: Path) -> bool:
    """By its beginning: text in any encoding that can be read here has no zero bytes, and is mostly UTF-8."""
    try:
        with path.open("rb") as file:
            beginning = file.read(LOOKED_AT)
    except OSError:
        return True  # reading it says why it can't be read
    if b"\0" in beginning:
        return False
    wrong = beginning.decode("utf-8", errors="replace").count("\N{REPLACEMENT CHARACTER}")
    return wrong <= len(beginning) * MOSTLY


def passed_over(count: int) -> str:
    """What is said of the files of a folder that are left out."""
    return f"passed over {count} file{'s' if count > 1 else ''} that hold no text"
