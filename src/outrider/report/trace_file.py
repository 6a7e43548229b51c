"""Where the page of a trace can be written: asked before anything is loaded for it, without torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from outrider.errors import ParameterError


def check_path(path: Path | str) -> Path:
    """The file that a path means, links followed. Raises `ParameterError` if no page can be written there."""
    try:
        place = Path(os.path.realpath(path))
        if place.exists() and not place.is_file():
            raise unwritable(path, "it is a folder" if place.is_dir() else "it is a device or a pipe")
        with tempfile.TemporaryFile(dir=place.parent):
            return place
    except OSError as error:
        raise unwritable(path, error.strerror) from None


def unwritable(path: Path | str, why: str | None) -> ParameterError:
    """The error for a page that can't be written."""
    return ParameterError(f"trace {path} can't be written ({why}): name a file in a folder that can be written")
