"""What is kept on disk is found by what made it: versions of libraries, and files of ours."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch

import outrider.models


def versions() -> tuple[str, ...]:
    """Of what makes and traces modules."""
    import transformers

    return outrider.__version__, torch.__version__, transformers.__version__


@cache
def file_digest(file: str) -> str:
    """Of the file as this process read it, or a little later."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


@cache
def own_files() -> str:
    """Of our files that make, trace or are traced."""
    folder = Path(outrider.models.__file__).parent
    others = [folder / name for name in ("lean", "llama_cpp", "openvino")]
    models = [file for file in sorted(folder.rglob("*.py")) if not any(file.is_relative_to(other) for other in others)]
    files = [*models, *sorted((folder.parent / "heads").rglob("*.py")), *sorted((folder.parent / "kernels").glob("*.*"))]
    return hashlib.sha256("".join(file_digest(str(file)) for file in files).encode()).hexdigest()
