"""Locks on files: held until they are closed, done without where a file system has none."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from outrider.support.file_lock import lock_file

fcntl = pytest.importorskip("fcntl")


def test_a_file_is_held_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("ab") as one, path.open("ab") as other:
        assert lock_file(one, wait=False)
        assert not lock_file(other, wait=False)
        one.close()
        assert lock_file(other, wait=False)


def test_whoever_waits_gets_it_then(tmp_path: Path) -> None:
    path = tmp_path / "file"
    got = threading.Event()

    def second() -> None:
        with path.open("ab") as file:
            lock_file(file, wait=True)
            got.set()

    with path.open("ab") as file:
        assert lock_file(file, wait=True)
        thread = threading.Thread(target=second)
        thread.start()
        assert not got.wait(0.05)
    thread.join(10)
    assert got.is_set()


def test_a_file_system_without_locks_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with (tmp_path / "file").open("ab") as file:
        assert lock_file(file, wait=False)
        assert lock_file(file, wait=True)
    (said,) = caplog.messages
    assert said == f"{tmp_path / 'file'} can't be locked (Operation not supported): let no other process write it meanwhile"
