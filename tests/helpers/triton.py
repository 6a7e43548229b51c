"""Python with Triton, which is there for tests alone where torch is a CPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TRITON = Path(sys.prefix) / "triton"  # where `make test` puts it


def run_with_triton(code: str, interpret: bool) -> str:
    """What it prints, in a process of its own: whether kernels are interpreted is decided when they are defined."""
    if find_spec("triton") is None and not TRITON.exists():
        pytest.skip("Triton is not installed: `make test` does that on Linux")
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TRITON)]).strip(os.pathsep)
    more = {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **more}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout
