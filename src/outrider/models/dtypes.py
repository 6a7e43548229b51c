"""Names of number formats and of devices, and the format that a device is quick in."""

from __future__ import annotations

import torch

from outrider.errors import ParameterError
from outrider.models.choices import check_dtype


def parse_dtype(dtype: str) -> torch.dtype | None:
    """A `torch.dtype`, None for "auto"."""
    check_dtype(dtype)
    found: torch.dtype | None = None if dtype == "auto" else getattr(torch, dtype)
    return found


def native_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it at full speed, float32 elsewhere."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def parse_device(device: str) -> torch.device:
    """A `torch.device`, checked to exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ParameterError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise ParameterError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ParameterError(f"device {device!r} is not there, this machine has {torch.cuda.device_count()}: use cpu")
    return place
