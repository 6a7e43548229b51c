"""Reading a GGUF file into transformers: converted to a plain model folder once, then loaded from there in seconds."""

from __future__ import annotations

import hashlib
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ModelError
from outrider.models.pretrained import without_bars
from outrider.models.weights.gguf_reading import quick_reading
from outrider.models.weights.gguf_tensors import architecture, mapped
from outrider.support.cache_folder import build_once

MAGIC = b"GGUF"
ENCODER_DECODERS = ("t5", "t5encoder")
FORMAT = 1  # raise it when the conversion changes, so that old conversions are made again


def check_gguf(path: Path) -> None:
    """Raise `ModelError` if the file is not a readable GGUF file."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelError(f"model {path} can't be read ({error.strerror}): check the path and its permissions") from None
    if start != MAGIC:
        raise ModelError(f"model {path} is not a GGUF file (it starts with {start!r}): download it again")
    with mapped(path) as data:
        kind = architecture(data)
    if kind in ENCODER_DECODERS:
        raise ModelError(
            f"model {path.name} ({kind}) can't be used: it is an encoder-decoder model, not read from GGUF "
            "files; name its folder or hub name, for engine transformers"
        )


def fingerprint(path: Path) -> str:
    """Identifies a file by name, size, and the hash of its first and last megabyte."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{FORMAT}:{size}".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read(1 << 20))
    return f"{path.stem}-{digest.hexdigest()[:16]}"


def convert_gguf(path: Path, dtype: torch.dtype) -> Path:
    """The folder with the file's model and tokenizer in `dtype`, made on first use."""
    check_gguf(path)
    name = str(dtype).removeprefix("torch.")
    about = f"Converting {path.name} for the transformers engine"
    return build_once(f"models/{fingerprint(path)}-{name}", lambda folder: _convert(path, dtype, folder), about)


def gguf_tokenizer(path: Path) -> Any:
    """The file's tokenizer without its weights, kept on first use: reading one of 150,000 entries takes seconds."""
    from transformers import AutoTokenizer

    def made(folder: Path) -> None:
        with quick_reading():
            _read_tokenizer(path).save_pretrained(folder)

    return AutoTokenizer.from_pretrained(build_once(f"tokenizers/{fingerprint(path)}", made))


def _read_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return ModelError(f"model {path} can't be read as GGUF ({reason}): download it again")


def _convert(path: Path, dtype: torch.dtype, folder: Path) -> None:
    with quick_reading():
        model, tokenizer = _load(path, dtype)
    with without_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers import modeling_gguf_pytorch_utils as gguf_reader

    bar, seen = getattr(gguf_reader, "tqdm", None), sys.stderr.isatty()
    if bar is not None and not seen:  # which transformers' own switch does not reach
        gguf_reader.tqdm = partial(bar, disable=True)
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        config = GgufConfig(dequantize=True)
        with nullcontext() if seen else without_bars():
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype, quantization_config=config)
    except Exception as error:  # the readers below raise whatever the damaged bytes lead them to
        raise _unreadable(path, error) from error
    finally:
        if bar is not None:
            gguf_reader.tqdm = bar
    tokenizer = _read_tokenizer(path)
    for key in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, key):
            delattr(model.config, key)
    return model, tokenizer
