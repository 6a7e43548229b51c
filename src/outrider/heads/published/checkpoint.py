"""Where a published head lies, and what is in its files. Hub names are fetched by huggingface_hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import ModelError, in_one_line
from outrider.heads.config import CONFIG

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Names of files with weights, the first one that is there."""
UNKNOWN = "another target"
"""Stands for a head's target where nothing names it."""
POINTER = b"version https://git-lfs"


def find_folder(place: str | Path) -> Path:
    """A folder with a head: `place`, or where the hub's of that name was fetched to. Raises `ModelError`."""
    folder = Path(place).expanduser()
    text = str(place)
    hub_name = text.count("/") == 1 and not text.startswith((".", "/", "~")) and all(text.split("/"))
    if folder.exists() or not hub_name:
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    mappable = [name for name in WEIGHTS if name.endswith(".safetensors")]
    try:
        found = Path(snapshot_download(text, allow_patterns=[CONFIG, *mappable]))
        if not any((found / name).is_file() for name in WEIGHTS):  # not both of what many have in two formats
            found = Path(snapshot_download(text, allow_patterns=[CONFIG, *WEIGHTS]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"draft head {text!r} is no folder and can't be fetched from the hub ({in_one_line(error, 160)}): name a "
            "folder, or a repository with a config.json and the weights"
        ) from error
    return found


def weights_file(folder: Path) -> Path:
    """Of a published head. Raises `ModelError` if there is none."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    parts = next(folder.glob("*.index.json"), None)
    reason = f"none of {', '.join(WEIGHTS)} is there"
    if parts is not None:
        reason = f"{parts.name} names several files, and only one of {', '.join(WEIGHTS)} is read"
    raise ModelError(f"draft head {folder} has no weights: {reason}")


def read_config(folder: Path) -> dict[str, Any]:
    """Its `config.json`. Raises `OSError` or `ValueError`."""
    found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{CONFIG} holds no object")
    return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """Mapped into memory where the format allows it; names without the prefixes that some writers put before all of them.

    Raises `ValueError`, or what safetensors raises.
    """
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(f"{path.name} is a Git LFS pointer: fetch the file itself")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        weights: dict[str, Tensor] = load_file(path)
    else:
        weights = _unpickled(path)
    return {_short(name): value for name, value in weights.items()}


def weight_of(weights: Mapping[str, Tensor], name: str, dimensions: int) -> Tensor:
    """One of them. Raises `ValueError` if it is not there, or has another number of dimensions."""
    if name not in weights:
        raise ValueError(f"it has no {name}")
    if weights[name].dim() != dimensions:
        raise ValueError(f"its {name} has {weights[name].dim()} dimensions, and should have {dimensions}")
    return weights[name]


def _unpickled(path: Path) -> dict[str, Tensor]:
    import pickle

    import torch

    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # written before torch had a format that can be mapped
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(in_one_line(error, 160)) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path.name} holds more than weights by name")
    return found


def _short(name: str) -> str:
    for prefix in ("module.", "model.", "medusa_head.", "medusa_heads."):
        name = name.removeprefix(prefix)
    return name
