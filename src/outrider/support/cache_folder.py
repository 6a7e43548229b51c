"""The folder where Outrider keeps what is costly to make again: converted models, measured costs."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Timer

from outrider.errors import CacheFolderError

_log = logging.getLogger(__name__)
_MOMENT = 1.0  # seconds
_LEFT = 86_400.0  # seconds after which what is half built is nobody's
_PARTIAL = ".partial-"
REMEDY = "set OUTRIDER_CACHE to a folder that you can write to"


def cache_folder() -> Path:
    """$OUTRIDER_CACHE, or `outrider` in the user's cache folder; made if missing, refused if it can't be written."""
    folder = _named()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CacheFolderError(f"cache folder {folder} can't be written ({error.strerror}): {REMEDY}") from None
    return folder


@cache
def warn_unkept(error: str) -> None:
    """Say once that nothing can be kept, whoever finds it out first. error: what `CacheFolderError` says."""
    _log.warning("nothing is kept and no kernels are built, which is slower: %s", error)


def _named() -> Path:
    base = os.environ.get("OUTRIDER_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def file_name(name: str) -> str:
    """A model's name as a part of a file's."""
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)[-80:]


def _remove_left(folder: Path) -> None:
    """Remove what builds have left that were killed: of processes of this machine that are gone, or a day old."""
    for partial in folder.glob(f"{_PARTIAL}*"):
        host, _, rest = partial.name.removeprefix(_PARTIAL).partition("-")
        process = rest.partition("-")[0]
        gone = host == _here() and process.isdigit() and not _runs(int(process))
        if gone or _idle_seconds(partial) > _LEFT:
            shutil.rmtree(partial, ignore_errors=True)


def _here() -> str:
    """Where process numbers mean the same: this machine since it was started, or container."""
    about = [platform.node()]
    with suppress(OSError):
        about += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def _runs(process: int) -> bool:
    """Whether there is such a process here; True where that can't be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _idle_seconds(folder: Path) -> float:
    """Since anything in it was written; 0 where it is gone by now."""
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        with suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return time.time() - newest if newest else 0.0


@contextmanager
def told(about: str, after: float | None = None) -> Iterator[None]:
    """Say what is done where it takes more than so many seconds, by default a moment."""
    if not about:
        yield
        return
    timer = Timer(_MOMENT if after is None else after, lambda: print(f"{about} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def build_once(name: str, build: Callable[[Path], None], about: str = "") -> Path:
    """The folder `name` in the cache, filled by `build(folder)` if it is not there yet.

    It is built beside its place and renamed, so that an interrupted build leaves nothing that looks finished.
    about: what it does, said on standard error (a terminal or not) if that takes more than a moment.
    """
    final = _named() / name
    if final.is_dir():  # also where nothing can be written any more
        return final
    cache_folder()
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(final.parent)
    partial = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{_here()}-{os.getpid()}-", dir=final.parent))
    try:
        with told(about and f"{about} (once)"):
            build(partial)
        if not final.is_dir():  # another process may have been quicker
            partial.rename(final)
    except OSError as error:
        if final.is_dir():  # another process has just finished
            return final
        if error.errno is None:
            raise
        reason = os.strerror(error.errno)
        raise CacheFolderError(f"cache folder {final.parent} can't be written ({reason}): {REMEDY}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
