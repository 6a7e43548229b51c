"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata

import torch
import transformers

import outrider
from outrider.support.processor import processor

ENGINES = ("openvino", "llama-cpp-python", "xllamacpp", "openvino-genai", "gguf")


def machine() -> dict[str, object]:
    """Processor, threads, versions."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "outrider": outrider.__version__,
        **_engines(),
    }


def _engines() -> dict[str, str]:
    """Versions of those that are installed here."""
    found = {}
    for name in ENGINES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
