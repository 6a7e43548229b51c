"""The output of a batch: a line for each prompt, written when it is finished, so that a run that was killed goes on.

Beside OUTPUT lies OUTPUT.run (a `RunLog`): the settings, the digest of the input, the cost tables. A run with others is
refused instead of mixed. A last line that was cut short is dropped, and its prompt computed again. While a run writes, the
file is locked: two at a time would do every prompt twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from outrider.errors import ParameterError
from outrider.support.file_lock import lock_file
from outrider.support.run_log import RunLog

_REMEDY = "give another --output, or delete this one and the .run file beside it"


class Journal:
    """The finished prompts of a run. Use it as a context manager.

    path: the output. settings: what all parts of the run must share. count: prompts of the input.
    done, errors, tokens: of the prompts that the file holds.
    """

    def __init__(self, path: Path, settings: Mapping[str, object], count: int) -> None:
        self.path = path
        self.count = count
        self.done = self.errors = self.tokens = 0
        self._finished = bytearray(count)  # a byte a prompt is all that is kept of what is done
        self._fresh = not path.exists()
        self._file = _open(path)
        try:
            about = path.with_name(f"{path.name}.run")
            if self._read_on():
                if not (about.exists() and about.stat().st_size):
                    raise ParameterError(f"output {path} was not made by outrider batch, or lacks its .run file: {_REMEDY}")
            elif about.exists():
                about.unlink()  # nothing was made with it
            self._about = RunLog(about, settings, _REMEDY)
            self._recall()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None and self._fresh and not (self.done or self.tables):
                self._remove()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None
        finally:
            self._file.close()

    def __contains__(self, index: object) -> bool:
        """Whether a prompt is done."""
        return isinstance(index, int) and bool(self._finished[index])

    @property
    def tables(self) -> dict[str, Any]:
        """The cost tables of the run; empty before they were measured."""
        return next((entry["costs"] for entry in self._about.entries if "costs" in entry), {})

    def keep_tables(self, tables: Mapping[str, Any]) -> None:
        """Keep the cost tables for the parts of the run to come."""
        if not self.tables:
            self._about.append({"costs": tables})

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a finished prompt; with the return it will survive the end of this process."""
        self._count(record, self.path)
        try:  # half a character, which is no UTF-8, is written as JSON escapes it
            self._file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def _remove(self) -> None:
        """Leave nothing of a run that ended before it began."""
        for path in (self.path, self.path.with_name(f"{self.path.name}.run")):
            path.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> ParameterError:
        return ParameterError(f"output {self.path} can't be written ({error.strerror}): make room and go on")

    def _read_on(self) -> bool:
        """Whether the file holds anything."""
        self._file.seek(0, os.SEEK_END)
        return self._file.tell() > 0

    def _recall(self) -> None:
        """Count what the file holds, a line at a time, and cut a torn last one off."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            record = _parse(line)
            if record is None:
                if line.endswith(b"\n") and self._file.read(1):
                    raise ParameterError(f"output {self.path}, line {number} is no record of a prompt: {_REMEDY}")
                break
            self._count(record, self.path)
            whole += len(line)
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)

    def _count(self, record: Mapping[str, Any], path: Path) -> None:
        index = record["index"]
        if not 0 <= index < self.count or self._finished[index]:
            raise ParameterError(f"output {path} holds prompt {index} twice, or has no such prompt: {_REMEDY}")
        self._finished[index] = 1
        self.done += 1
        self.errors += "error" in record
        self.tokens += len(record.get("tokens", ()))


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record, or None for what is none; a line without its end may be half a line that happens to be JSON."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    good = isinstance(record, dict) and isinstance(record.get("index"), int)
    return record if good else None


def _open(path: Path) -> BinaryIO:
    """Open for reading and appending, for this process alone."""
    if path.exists() and not path.is_file():
        raise ParameterError(f"output {path} must be a file, from which a run can go on: name one")
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ParameterError(f"output {path} can't be written ({error.strerror}): check the path") from None
    if not lock_file(file, wait=False):
        file.close()
        raise ParameterError(f"output {path} is being written by another process: wait for it, or name another") from None
    return file
