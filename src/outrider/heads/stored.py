"""What is read from a head's folder, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ModelError
from outrider.heads.config import CONFIG, HeadConfig, StoredHead, load_config, load_head, reading
from outrider.heads.published.checkpoint import read_config, read_weights, weights_file
from outrider.heads.published.eagle import read_eagle
from outrider.heads.published.medusa import read_medusa


def read_head(folder: Path) -> StoredHead:
    """Of Outrider's (`outrider train`), or of another project's. Raises `ModelError`."""
    if _is_ours(folder):
        return StoredHead(*load_head(folder))
    with reading(folder):
        about = read_config(folder)
        weights = read_weights(weights_file(folder))
        medusa = "medusa_num_heads" in about or any(name.startswith(("0.0.", "lm_heads.", "blocks.")) for name in weights)
        named = about.get("base_model_name_or_path") or _verifier(about) or folder.name
        return (read_medusa if medusa else read_eagle)(str(named), about, weights)


def read_shape(folder: Path) -> HeadConfig:
    """Its shape alone."""
    return load_config(folder) if _is_ours(folder) else read_head(folder).config


def files_of(folder: Path) -> list[Path]:
    """Those that a head is read from; of one that can't be read, those that would be."""
    try:
        return [folder / CONFIG, weights_file(folder)]
    except ModelError:
        return [folder / CONFIG]


def _is_ours(folder: Path) -> bool:
    """Outrider's config names a kind; so does nothing of the others'."""
    with reading(folder):
        return "kind" in read_config(folder)


def _verifier(about: dict[str, object]) -> str | None:
    outer = about.get("speculators_config")
    verifier = outer.get("verifier") if isinstance(outer, dict) else None
    found = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return found if isinstance(found, str) else None
