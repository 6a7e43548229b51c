"""A log of runs as JSON lines, so that a measurement that was interrupted goes on where it stopped.

The first line may say with which settings the runs were made; a log made with others is refused instead of mixed. A last
line that was cut short (power, disk, kill) is dropped: its run is made again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.errors import ParameterError
from outrider.support.whole_files import replace_whole

_HEADER = "settings"


class RunLog:
    """Runs as plain dictionaries, in the order they were made. entries: those made so far.

    path: the file, made with its first line; None keeps nothing. settings: what all runs must share; None for logs whose
    entries say everything themselves. remedy: what to do about a log of other runs, for the message.
    Raises `ParameterError` if the file is not such a log, or was made with other settings.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, object] | None = None,
        remedy: str = "give another --log, or delete it",
    ) -> None:
        self.path = path
        self._remedy = remedy
        self.entries: list[dict[str, Any]] = []
        self._settings = None if settings is None else as_read_back(settings)
        if path is not None:
            self._open(path)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Keep one run."""
        self.entries.append(dict(entry))
        if self.path is not None:
            _write(self.path, entry)

    def _open(self, path: Path) -> None:
        lines, whole = _read(path)
        made_with = lines.pop(0)[_HEADER] if lines and _HEADER in lines[0] else None
        if lines or made_with is not None:
            self._check(path, made_with)
        if whole is not None:  # only now is it known to be a log, which may be changed
            try:
                replace_whole(path, whole)
            except OSError as error:
                raise ParameterError(f"log {path} can't be written: {error}") from None
        if not lines and made_with is None and self._settings is not None:
            _write(path, {_HEADER: self._settings})
        self.entries = lines

    def _check(self, path: Path, made_with: Any) -> None:
        mine = self._settings
        if (made_with is None) != (mine is None):
            raise ParameterError(f"log {path} was made by another command: {self._remedy}")
        if made_with is not None and mine is not None and (told := differences(made_with, mine)):
            raise ParameterError(f"log {path} was made with other settings ({told}): {self._remedy}")


def as_read_back(settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings as they are when they are read back from a JSON file (tuples are lists there)."""
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def differences(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    """What differs between settings that were read back and ours, for a message; "" if nothing does.

    One that is not there is None: options that came later are off in what was made before.
    """
    differ = [name for name in {**stored, **mine} if stored.get(name) != mine.get(name)]
    return "; ".join(f"{name}: {stored.get(name)!r} there, {mine.get(name)!r} here" for name in differ)


def result_path(log: Path) -> Path:
    """Where a command leaves its figures: beside its log, the object that --json prints."""
    return log.with_name(f"{log.name}.result.json")


def read_log(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A log as it stands, whatever its settings; nothing is changed. → its settings, its runs

    Raises `ParameterError` if it is no log that says with which settings it was made.
    """
    lines, _ = _read(path)
    if not lines or not isinstance(lines[0].get(_HEADER), dict):
        raise ParameterError(f"log {path} does not say how it was made: give a log of bench sweep, tasks, alpha or toyllm")
    return lines[0][_HEADER], lines[1:]


def _read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """→ the lines; what the file should hold, if its last line was cut short"""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"log {path} can't be read: {error}") from None
    found: list[dict[str, Any]] = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        entry = _parse(line)
        if isinstance(entry, dict):
            found.append(entry)
        elif found and number == len(lines) and not line.endswith("\n"):
            return found, "".join(lines[:-1])
        elif line.strip():
            raise ParameterError(f"log {path} is not a log of runs: line {number} is no JSON object")
    return found, f"{text}\n" if text and not text.endswith("\n") else None


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _write(path: Path, entry: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise ParameterError(f"log {path} can't be written: {error}") from None
