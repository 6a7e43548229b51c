"""Libraries of C++, compiled for this processor when they are first needed, kept in the cache folder and tried before use.

Compiled by the user's C++ compiler, not ahead of time: what they are compiled for is the processor at hand. It takes seconds
of one core, once. Without a compiler, or on a processor that they are not written for, whoever asked does without.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from outrider.errors import CacheFolderError, in_one_line
from outrider.support.cache_folder import build_once, warn_unkept

COMPILERS = ("c++", "g++", "clang++")
LEVELS = {
    "avx512_vnni": ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni", "fma3", "f16c"),
    "avx2": ("avx2", "fma3", "f16c"),
}
"""What a processor must have (as `torch.cpu.get_capabilities` calls it), the best first."""
_SWITCHES = {name: name.replace("_", "", 1) for name in LEVELS["avx512_vnni"]} | {"fma3": "fma"}  # as the compiler calls it
# No sum may be fused or reordered: results must not depend on what the compiler makes of a width.
_EXACT = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd")
_OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-w", *_EXACT, "-DTORCH_TARGET_VERSION=0x020a000000000000")
_SECONDS = 300  # a compiler that takes longer hangs
Opened = TypeVar("Opened")


class UnbuiltError(Exception):
    """Why there are no kernels."""


@dataclass(frozen=True)
class Library:
    """What one library is made of. name: its folder in the cache. sources: their names in this folder, without `.cpp`;
    headers: what these include.

    namespace: of its operations in torch, followed by the level. about: what is said while it is compiled.
    """

    name: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    namespace: str
    about: str

    def within(self, level: str) -> str:
        """The namespace of its operations in torch, for a level."""
        return f"{self.namespace}_{level}"

    @property
    def file(self) -> str:
        """Its name in its folder."""
        return f"{self.name}.so"

    @property
    def paths(self) -> list[Path]:
        """Of its sources."""
        return [Path(__file__).with_name(f"{source}.cpp") for source in self.sources]

    @property
    def read(self) -> list[Path]:
        """All files that it is made of."""
        return [*(Path(__file__).with_name(header) for header in self.headers), *self.paths]


def level_here() -> str | None:
    """What this processor has of `LEVELS`, None for another architecture or system."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:  # an older torch, whose headers are not those that the sources need
        return None
    has = capabilities()
    return next((level for level, needed in LEVELS.items() if all(has.get(name) for name in needed)), None)


def built(library: Library, level: str, opened: Callable[[Path], Opened]) -> Opened:
    """A library of a level, from the cache folder or compiled now, as `opened` gives it. Raises `UnbuiltError`."""
    command = (*_OPTIONS, *(f"-m{_SWITCHES.get(name, name)}" for name in LEVELS[level]))
    system = (torch.__version__, *platform.libc_ver())  # what a library that was built here needs elsewhere, too
    parts = (*(source.read_bytes() for source in library.read), repr((command, system)).encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    name = f"{library.name}/{level}-{digest}"

    def built() -> Path:
        about = f"Compiling {library.about} for this processor"
        return build_once(name, lambda at: _compile(at, library, level, command), about)

    try:
        folder = built()
        try:
            return opened(folder / library.file)
        except OSError:  # damaged, or of another system
            shutil.rmtree(folder, ignore_errors=True)
        return opened(built() / library.file)
    except (CacheFolderError, OSError, RuntimeError) as error:
        raise UnbuiltError(in_one_line(error.__cause__ or error, 200)) from error


def built_here(build: Callable[[str], Opened], log: logging.Logger, message: str) -> Opened | None:
    """What `build` makes for this processor's level; None where there is none, or, with a warning, where it raises
    `UnbuiltError`. message: what that means, with a place for the reason, the cache folder apart.
    """
    level = level_here()
    if level is None:
        return None
    try:
        return build(level)
    except UnbuiltError as error:
        if isinstance(error.__cause__, CacheFolderError):  # which others find, too
            warn_unkept(str(error.__cause__))
        else:
            log.warning(message, error)
        return None


def _first_cache() -> int:
    """Bytes of a core's first cache of data, 0 if the system does not say."""
    for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = ((cache / name).read_text().strip() for name in ("level", "type", "size"))
            if level == "1" and kind == "Data" and size.endswith("K"):
                return int(size[:-1]) << 10
        except (OSError, ValueError):
            continue
    return 0


def _compile(folder: Path, library: Library, level: str, options: tuple[str, ...]) -> None:
    """Each source by a process of its own, side by side, then one library of all."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise UnbuiltError(f"$CXX can't be read: {error}") from error
    compiler = named or [found for name in COMPILERS if (found := shutil.which(name))][:1]
    if not compiler:
        raise UnbuiltError(f"there is no C++ compiler ({', '.join(COMPILERS)}): install g++")
    root = Path(torch.__file__).parent
    # Not a part of the name: another cache makes no other bits, and what is kept of models bears the name.
    defined = [f"-DOUTRIDER_NAMESPACE={library.within(level)}", f"-DOUTRIDER_FIRST_CACHE={_first_cache()}"]
    shared = [*compiler, *options, *defined, "-I", str(root / "include")]
    objects = [str(folder / f"{source.stem}.o") for source in library.paths]
    _run_all([[*shared, "-c", str(source), "-o", made] for source, made in zip(library.paths, objects, strict=True)])
    _run_all([[*compiler, "-shared", *objects, "-o", str(folder / library.file), "-L", str(root / "lib"), "-ltorch_cpu"]])
    for made in objects:
        os.unlink(made)


def _run_all(commands: list[list[str]]) -> None:
    """Side by side. Raises `UnbuiltError` with the first error that one of them prints."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=_SECONDS)[1] for process in running]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnbuiltError(in_one_line(error, 200)) from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, text in zip(running, said, strict=True):
        if process.returncode != 0:
            found = next(
                (line for line in text.splitlines() if "error" in line), f"the compiler ended with {process.returncode}"
            )
            raise UnbuiltError(in_one_line(found, 200))
