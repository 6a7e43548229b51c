"""Checkpoints of one run, and with which settings it was begun: a run that goes on goes on as it was.

output/checkpoints/settings.json says what the weights depend on. Checkpoints of other settings are refused instead of
continued, so that the card tells how the draft was really made. How long to train is not among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ParameterError
from outrider.support.run_log import as_read_back, differences
from outrider.support.whole_files import replace_whole

CHECKPOINTS = "checkpoints"  # in the output
SETTINGS = "settings.json"


def last_checkpoint(folder: Path, resume: bool) -> str | None:
    """The checkpoint to go on from, None to begin. Raises `ParameterError` if what is there is not what was asked for."""
    from transformers.trainer_utils import get_last_checkpoint

    last: str | None = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if last and not resume:
        raise ParameterError(f"checkpoints are in {folder}: go on with --resume, or name another output")
    if resume and not last:
        raise ParameterError(f"resume needs a checkpoint, and none is in {folder}: begin without --resume")
    return last


def check_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Raise `ParameterError`, naming what differs, unless the checkpoints in `folder` were made with these settings."""
    path = folder / SETTINGS
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        stored = None
    if not isinstance(stored, dict):
        raise ParameterError(
            f"resume can't tell how the checkpoints in {folder} were made: {SETTINGS} is missing there; name another output"
        )
    if told := differences(stored, as_read_back(settings)):
        raise ParameterError(
            f"resume must keep the settings of the checkpoints in {folder} ({told}): give those, or name another output"
        )


def keep_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Say with which settings a run begins. Raises `ParameterError` if the folder can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_whole(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        raise ParameterError(f"checkpoints can't be written to {folder} ({error.strerror}): name another output") from None
