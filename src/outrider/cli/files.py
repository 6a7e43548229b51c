"""Writing what was computed: whole files or none, and one clear line where they can't be written."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.errors import ParameterError

PICTURES = (".svg", ".png", ".pdf")


def write(path: Path, text: str) -> None:
    """Write a text file, replacing it at once: whoever reads it meanwhile sees the old one."""
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", dir=path.parent, delete=False) as file:
            try:
                file.write(text)
                file.close()
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ParameterError(f"out {path} can't be written: {error.strerror}; name a file in a folder that can be") from None


def folder(path: Path) -> None:
    """Make the folder if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"out {path} can't be made a folder: {error.strerror}; name another") from None
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
        raise ParameterError(f"output {path} can't be made a folder: {around} is none, or nothing can be written there")


def check_folder(path: Path) -> None:
    """Raise unless files can be written there: known before the work is done."""
    if not path.is_dir():
        raise ParameterError(f"out is to be in {path}, which is no folder: name one that is")
    if not os.access(path, os.W_OK):
        raise ParameterError(f"out is to be in {path}, where nothing can be written: name another folder")


def check_parent(path: Path | None) -> None:
    """Raise unless the folder is there in which a file is to be written."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ParameterError(f"file {path} can't be written: there is no folder {path.resolve().parent}")


def check_other_file(name: str, path: Path | None, *inputs: Path | None) -> None:
    """Raise if what is to be written is one of the files that are read: it would be gone."""
    for given in inputs:
        if path is not None and given is not None and path.resolve() == given.resolve():
            raise ParameterError(f"{name} must be another file than the input, got {path} for both")


def check_plot(path: Path | None) -> None:
    """Raise unless a picture can be drawn there: known before hours of measuring."""
    check_parent(path)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ParameterError("plots need matplotlib: run `pip install matplotlib`")
    if path is not None and path.suffix not in PICTURES:
        raise ParameterError(f"plot must be a {', '.join(PICTURES[:-1])} or {PICTURES[-1]} file, got {path}")


def check_html(path: Path | None) -> None:
    """Raise unless the path may be that of a page."""
    if path is not None and path.suffix != ".html":
        raise ParameterError(f"out must end in .html, got {path}")


def as_csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Comma-separated values with a line of names; nothing for None."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return out.getvalue()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
