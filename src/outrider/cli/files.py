"""Writing what was computed: whole files or none, and one clear line where they can't be written."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import ParameterError
from outrider.support.optional import require
from outrider.support.whole_files import replace_whole

PICTURES = (".svg", ".png", ".pdf")


def write(path: Path, text: str) -> None:
    """Write a text file, replacing it at once: whoever reads it meanwhile sees the old one. Devices are written to."""
    try:
        if _is_device(path):
            path.write_text(text, encoding="utf-8", newline="")
        else:
            replace_whole(path, text)
    except OSError as error:
        raise ParameterError(
            f"file {path} can't be written: {error.strerror}; name a file in a folder that can be"
        ) from None


def folder(path: Path) -> None:
    """Make the folder if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"folder {path} can't be made: {error.strerror}; name another") from None
    check_folder(path)


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make it if need be, and its parents; take away what is still empty of these if what is done within fails."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    folder(path)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # one that is not empty, and those around it
            for each in missing:
                each.rmdir()
        raise


def check_new_folder(path: Path) -> None:
    """Raise unless it is a folder that can be written to, or can be made: known before the work is done."""
    if path.exists() or path.is_symlink():
        check_folder(path)
        return
    around = next(each for each in path.resolve().parents if each.exists())
    if not around.is_dir() or not os.access(around, os.W_OK):
        raise ParameterError(f"folder {path} can't be made: {around} is none, or nothing can be written there")


def check_folder(path: Path) -> None:
    """Raise unless files can be written there: known before the work is done."""
    if not path.is_dir():
        raise ParameterError(f"{path} is a file, no folder" if path.exists() else f"there is no folder {path}")
    if not os.access(path, os.W_OK):
        raise ParameterError(f"nothing can be written to the folder {path}: name another")


def check_file(path: Path | None) -> None:
    """Raise unless a file can be written there, or is: known before the work is done."""
    if path is None:
        return
    parent = path.resolve().parent
    if not parent.is_dir():
        raise ParameterError(f"file {path} can't be written: there is no folder {parent}")
    if path.is_dir():
        raise ParameterError(f"file {path} can't be written: it is a folder; name a file in it")
    if _is_device(path):
        return
    try:
        with tempfile.TemporaryFile(dir=parent):  # permissions alone say too much: to root, and on odd file systems
            possible = not path.exists() or os.access(path, os.W_OK)
    except OSError:
        possible = False
    if not possible:
        raise ParameterError(f"file {path} can't be written: its permissions forbid it; name another")


def check_other_file(name: str, path: Path | None, *inputs: Path | None) -> None:
    """Raise if what is to be written is one of the files that are read: it would be gone."""
    for given in inputs:
        if path is not None and given is not None and path.resolve() == given.resolve():
            raise ParameterError(f"{name} must be another file than the input, got {path} for both")


def check_plot(path: Path | None) -> None:
    """Raise unless a picture can be drawn there: known before hours of measuring."""
    check_file(path)
    if path is not None:
        require("matplotlib", "a plot")
    if path is not None and path.suffix not in PICTURES:
        raise ParameterError(f"plot must be a {', '.join(PICTURES[:-1])} or {PICTURES[-1]} file, got {path}")


def check_html(path: Path | None) -> None:
    """Raise unless the path may be that of a page."""
    if path is not None and path.suffix != ".html":
        raise ParameterError(f"output must end in .html, got {path}")


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Comma-separated values with a line of names; nothing for None."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return out.getvalue()


def _is_device(path: Path) -> bool:
    """Whether it is there and no ordinary file: /dev/stdout, a pipe."""
    return path.exists() and not path.is_file()
