"""Our kernels, compiled for this processor when they are first needed, kept in the cache folder and tried before use.

Compiled by the user's C++ compiler, not ahead of time: what they are compiled for is the processor at hand. It takes 12
seconds of one core, once. Without a compiler, or on a processor that they are not written for, whoever asked does without.
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
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CacheFolderError, in_one_line
from outrider.models.cache_folder import build_once

SOURCES = tuple(Path(__file__).with_name(name) for name in ("rounded_linear.cpp", "rows.cpp", "attention.cpp"))
HEADER = Path(__file__).with_name("rows.h")
LIBRARY = "kernels.so"
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
_log = logging.getLogger(__name__)


class UnbuiltError(Exception):
    """Why there are no kernels."""


class Kernels:
    """Operations of torch: `linear_int8`, `linear_int4`, `pack_int8`, `pack_int4`, `rms_norm`, `silu`, `rotate`, `attend`;
    `fused_int8`, `fused_int4` and `attend_new` are several of these in one (`fusing`).

    What they are given and return: see their sources.

    largest: what a weight in 8 bits is at most, 127 or 64. digest: of their sources and how they are compiled.
    """

    def __init__(self, level: str, library: Path) -> None:
        self.level = level
        self.digest = library.parent.name.rpartition("-")[2]
        self.largest = 64 if level == "avx2" else 127
        self.ops: Any = getattr(torch.ops, namespace(level))
        if not hasattr(self.ops, "linear_int4"):  # torch ends the process if an operation is defined twice
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            for name in ("linear_int8", "linear_int4"):
                torch.library.register_fake(f"{namespace(level)}::{name}", _shape)
            for name in ("rms_norm", "silu"):
                torch.library.register_fake(f"{namespace(level)}::{name}", _same)
            torch.library.register_fake(f"{namespace(level)}::attend", _attended)
        self._try()

    def _try(self) -> None:
        """Raise `UnbuiltError` unless small products are what they should be."""
        generator = torch.Generator().manual_seed(0)
        float32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch makes by default
        at: dict[str, Any] = {"generator": generator, "device": "cpu"}
        values = torch.randint(-self.largest, self.largest + 1, (35, 45), **at, dtype=torch.int8)
        x = torch.randint(-126, 127, (11, 45), **at).float()
        x[:, 0] = 127.0  # so that the scale of each row is 1
        want = x.double() @ values.double().T
        packed = self.ops.pack_int8(values)
        if not torch.equal(self.ops.linear_int8(x, packed, torch.ones(48, **float32), None, 35).double(), want):
            raise UnbuiltError("8-bit products are wrong")
        few = values.remainder(16)
        packed, _ = self.ops.pack_int4(few.float())
        want = x.double() @ few.double().T
        if not torch.allclose(self.ops.linear_int4(x, packed, None, 35).double(), want, rtol=1e-2, atol=1e-2 * 127 * 15):
            raise UnbuiltError("4-bit products are wrong")
        rows = torch.randn(1, 3, 5, 16, **at, dtype=torch.float32)
        want = rows.double() * (rows.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * 3
        normed = self.ops.rms_norm(rows, torch.full((16,), 2.0, **float32), 1e-5, 1.0)
        turned = self.ops.rotate(rows, rows[:, :1], rows[:, 1:2])
        want_turned = rows * rows[:, :1] + torch.cat([-rows[..., 8:], rows[..., :8]], -1) * rows[:, 1:2]
        scores = rows.double() @ rows[:, :1].double().transpose(2, 3)
        attended = (scores.softmax(-1) @ rows[:, 1:2].double()).transpose(1, 2)
        found = self.ops.attend(rows, rows[:, :1], rows[:, 1:2], None, 1.0)
        near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
        if not torch.allclose(normed.double(), want, **near) or not torch.equal(turned, want_turned):
            raise UnbuiltError("norms or rotations are wrong")
        if not torch.allclose(found.double(), attended, **near):
            raise UnbuiltError("attention is wrong")


def _shape(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """What the results of linear layers look like; the last argument is the number of outputs."""
    del weight
    return x.new_empty((*x.shape[:-1], others[-1]))


def _same(x: Tensor, *others: Any) -> Tensor:
    del others
    return x.new_empty(x.shape)


def _attended(query: Tensor, *others: Any) -> Tensor:
    del others
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], query.shape[3]))


def namespace(level: str) -> str:
    """Of its operations in torch."""
    return f"outrider_{level}"


@cache
def kernels() -> Kernels | None:
    """The best that this processor has; None, with a warning, where they can't be built. Takes seconds the first time."""
    level = level_here()
    if level is None:
        return None
    try:
        return build(level)
    except UnbuiltError as error:
        _log.warning(
            "kernels for rounded weights can't be built (%s): models in 8 bits use torch's, which are slower", error
        )
        return None


def level_here() -> str | None:
    """What this processor has of `LEVELS`, None for another architecture or system."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:  # an older torch, whose headers are not those that the sources need
        return None
    has = capabilities()
    return next((level for level, needed in LEVELS.items() if all(has.get(name) for name in needed)), None)


def build(level: str) -> Kernels:
    """Those of a level, from the cache folder or compiled now. Raises `UnbuiltError`."""
    command = (*_OPTIONS, *(f"-m{_SWITCHES.get(name, name)}" for name in LEVELS[level]))
    system = (torch.__version__, *platform.libc_ver())  # what a library that was built here needs elsewhere, too
    parts = (*(source.read_bytes() for source in (HEADER, *SOURCES)), repr((command, system)).encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    name = f"kernels/{level}-{digest}"
    try:
        folder = build_once(name, lambda at: _compile(at, level, command))
        try:
            return Kernels(level, folder / LIBRARY)
        except OSError:  # damaged, or of another system
            shutil.rmtree(folder, ignore_errors=True)
        folder = build_once(name, lambda at: _compile(at, level, command))
        return Kernels(level, folder / LIBRARY)
    except (CacheFolderError, OSError, RuntimeError) as error:
        raise UnbuiltError(in_one_line(error.__cause__ or error, 200)) from error


def _compile(folder: Path, level: str, options: tuple[str, ...]) -> None:
    """Each source by a process of its own, side by side, then one library of all."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise UnbuiltError(f"$CXX can't be read: {error}") from error
    compiler = named or [found for name in COMPILERS if (found := shutil.which(name))][:1]
    if not compiler:
        raise UnbuiltError(f"there is no C++ compiler ({', '.join(COMPILERS)}): install g++")
    if sys.stderr.isatty():
        print("Compiling kernels for this processor (once) …", file=sys.stderr, flush=True)
    root = Path(torch.__file__).parent
    shared = [*compiler, *options, f"-DOUTRIDER_NAMESPACE={namespace(level)}", "-I", str(root / "include")]
    objects = [str(folder / f"{source.stem}.o") for source in SOURCES]
    _run_all([[*shared, "-c", str(source), "-o", made] for source, made in zip(SOURCES, objects, strict=True)])
    _run_all([[*compiler, "-shared", *objects, "-o", str(folder / LIBRARY), "-L", str(root / "lib"), "-ltorch_cpu"]])
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
