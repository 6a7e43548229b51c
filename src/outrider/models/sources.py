"""Where transformers finds a model that was named, and what changes with its files."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.models.names import check_at_hand, name_of, resolve
from outrider.models.pretrained import model_errors
from outrider.models.weights.gguf import convert_gguf


def folder_of(model: str | Path | None, gguf_dtype: torch.dtype) -> tuple[str | Path, str]:
    """Where transformers finds a model, and its name in messages."""
    source = resolve(model)
    if isinstance(source, Path) and source.is_file():
        return convert_gguf(source, gguf_dtype), name_of(model)
    check_at_hand(source)
    return source, name_of(model)


def identity(source: str | Path) -> str:
    """What changes when the files of a model do: their names, sizes and times, or the commit on the hub."""
    if isinstance(source, Path):
        files = sorted(f for f in source.iterdir() if f.is_file())
        return repr([str(source.resolve()), *((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files)])
    from transformers import AutoConfig

    with model_errors(str(source)):
        return f"{source} {getattr(AutoConfig.from_pretrained(source), '_commit_hash', None)}"
