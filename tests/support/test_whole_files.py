"""Files that are replaced at once, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.support.whole_files import replace_whole, replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    replace_whole(path, "ä\r\n")
    assert path.read_bytes() == "ä\r\n".encode()
    replace_whole(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    assert names(tmp_path) == ["file.txt"]


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_two_writers_at_once_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    with replacing(path) as first:
        first.write(b"a" * 1000)
        with replacing(path) as second:
            second.write(b"b")
        assert path.read_bytes() == b"b"
        first.write(b"a")
    assert path.read_bytes() == b"a" * 1001
    assert names(tmp_path) == ["file.txt"]


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt(), ValueError()])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file.txt"]


def test_a_place_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (folder, tmp_path / "missing" / "file.txt"):
        with pytest.raises(OSError, match=r"."):
            replace_whole(path, "text")
    assert names(tmp_path) == ["folder"]
    assert names(folder) == []


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "file.txt"
    path.write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to(path)
    replace_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert names(tmp_path) == ["folder", "link.txt"]


def test_permissions_are_those_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_whole(tmp_path / "file.txt", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file.txt").stat().st_mode & 0o777 == 0o640


def test_long_names_can_be_written(tmp_path: Path) -> None:
    name = "ä" * 100 + ".json"
    replace_whole(tmp_path / name, "text")
    assert names(tmp_path) == [name]
