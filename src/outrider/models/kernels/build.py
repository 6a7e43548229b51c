"""Our kernels, compiled for this processor when they are first needed, kept in the cache folder and tried before use.

Compiled by the user's C++ compiler, not ahead of time: what they are compiled for is the processor at hand. It takes some
3 seconds, once. Where there is no compiler, or a processor that they are not written for, whoever asked does without.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
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
COMPILERS = ("c++", "g++", "clang++")
LEVELS = {
    "avx512_vnni": ("avx512_f", "avx512_bw", "avx512_vl", "avx512_dq", "avx512_vnni", "fma3", "f16c"),
    "avx2": ("avx2", "fma3", "f16c"),
}
"""What a processor must have (as `torch.cpu.get_capabilities` calls it), the best first."""
_SWITCHES = {name: name.replace("_", "", 1) for name in LEVELS["avx512_vnni"]} | {"fma3": "fma"}  # as the compiler calls it
# No sum may be fused or reordered: results must not depend on what the compiler makes of a width.
_EXACT = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd")
_OPTIONS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-w", *_EXACT, "-DTORCH_TARGET_VERSION=0x020a000000000000")
_SECONDS = 300  # a compiler that takes longer hangs
_log = logging.getLogger(__name__)


class UnbuiltError(Exception):
    """Why there are no kernels."""


class Kernels:
    """Operations of torch: `linear_int8`, `linear_int4`, `pack_int8`, `pack_int4`, `rms_norm`, `rotate`, `attend`.

    What they are given and return: see their sources.

    largest: what a weight in 8 bits is at most, 127 or 64.
    """

    def __init__(self, level: str, library: Path) -> None:
        self.level = level
        self.largest = 64 if level == "avx2" else 127
        self.ops: Any = getattr(torch.ops, namespace(level))
        if not hasattr(self.ops, "linear_int4"):  # torch ends the process if an operation is defined twice
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            for name in ("linear_int8", "linear_int4"):
                torch.library.register_fake(f"{namespace(level)}::{name}", _shape)
            torch.library.register_fake(f"{namespace(level)}::rms_norm", _same)
            torch.library.register_fake(f"{namespace(level)}::attend", _attended)
        self._try()

    def _try(self) -> None:
        """Raise `UnbuiltError` unless small products are what they should be."""
        generator = torch.Generator().manual_seed(0)
        values = torch.randint(-self.largest, self.largest + 1, (35, 45), generator=generator, dtype=torch.int8)
        x = torch.randint(-126, 127, (11, 45), generator=generator).float()
        x[:, 0] = 127.0  # so that the scale of each row is 1
        want = x.double() @ values.double().T
        packed = self.ops.pack_int8(values)
        if not torch.equal(self.ops.linear_int8(x, packed, torch.ones(48), None, 35).double(), want):
            raise UnbuiltError("8-bit products are wrong")
        few = values.remainder(16)
        packed, _ = self.ops.pack_int4(few.float())
        want = x.double() @ few.double().T
        if not torch.allclose(self.ops.linear_int4(x, packed, None, 35).double(), want, rtol=1e-2, atol=1e-2 * 127 * 15):
            raise UnbuiltError("4-bit products are wrong")


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
    has = torch.cpu.get_capabilities()
    return next((level for level, needed in LEVELS.items() if all(has.get(name) for name in needed)), None)


def build(level: str) -> Kernels:
    """Those of a level, from the cache folder or compiled now. Raises `UnbuiltError`."""
    command = (*_OPTIONS, *(f"-m{_SWITCHES.get(name, name)}" for name in LEVELS[level]))
    parts = (*(source.read_bytes() for source in SOURCES), repr(command).encode(), torch.__version__.encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    try:
        folder = build_once(f"kernels/{level}-{digest}", lambda at: _compile(at, level, command))
        return Kernels(level, folder / "kernels.so")
    except (CacheFolderError, OSError, RuntimeError) as error:
        raise UnbuiltError(in_one_line(error, 200)) from error


def _compile(folder: Path, level: str, options: tuple[str, ...]) -> None:
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise UnbuiltError(f"there is no C++ compiler ({', '.join(COMPILERS)}): install g++")
    root = Path(torch.__file__).parent
    command = [
        compiler,
        *options,
        f"-DOUTRIDER_NAMESPACE={namespace(level)}",
        "-I",
        str(root / "include"),
        *map(str, SOURCES),
    ]
    command += ["-o", str(folder / "kernels.so"), "-L", str(root / "lib"), "-ltorch_cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnbuiltError(in_one_line(error, 200)) from error
    if done.returncode != 0:
        reason = next(
            (line for line in done.stderr.splitlines() if "error" in line), f"{compiler} ended with {done.returncode}"
        )
        raise UnbuiltError(in_one_line(reason, 200))
