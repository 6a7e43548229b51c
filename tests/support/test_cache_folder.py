"""The cache folder: what is half built is nobody's once whoever built it is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.support import cache_folder
from outrider.support.cache_folder import build_once

KILLED = """
import os, signal
from outrider.support.cache_folder import build_once

def build(folder):
    (folder / "weights").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

build_once("models/one", build)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "models"


def whole(folder: Path) -> None:
    (folder / "weights").write_bytes(b"whole")


def test_what_a_killed_build_left_is_removed_by_the_next(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert [path.name.startswith(".partial-") for path in folder.iterdir()] == [True]
    build_once("models/other", whole)
    assert [path.name for path in folder.iterdir()] == ["other"]


def test_what_others_are_building_stays(folder: Path) -> None:
    """By another process here, by one of another machine, and by earlier versions, which told nothing."""
    here, other = cache_folder._here(), os.getppid()
    names = [f".partial-{here}-{other}-x", ".partial-elsewhere-1-x", ".partial-x"]
    for name in names:
        (folder / name).mkdir(parents=True)
    build_once("models/one", whole)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "one"])
    for name in names:
        (folder / name / "weights").write_bytes(b"half")
        os.utime(folder / name / "weights", (1, 1))
        os.utime(folder / name, (1, 1))
    os.utime(folder / names[0])  # written to just now
    build_once("models/two", whole)
    assert sorted(path.name for path in folder.iterdir()) == sorted([names[0], "one", "two"])


def test_machines_of_one_domain_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for name in ("gpu001.cluster.physics.example.edu", "gpu002.cluster.physics.example.edu"):
        monkeypatch.setattr("platform.node", lambda name=name: name)
        found.add(cache_folder._here())
    assert len(found) == 2
    assert all(one.isalnum() for one in found)


def test_a_build_within_a_build_keeps_both(folder: Path) -> None:
    def outer(made: Path) -> None:
        build_once("models/inner", whole)
        whole(made)

    build_once("models/outer", outer)
    assert sorted(path.name for path in folder.iterdir()) == ["inner", "outer"]
