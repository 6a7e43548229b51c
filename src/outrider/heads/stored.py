"""What is read from a head's folder, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ModelError
from outrider.heads.config import CONFIG, HeadConfig, StoredHead, load_config, load_head, reading
from outrider.heads.published.checkpoint import read_config, read_weights, weights_file
from outrider.heads.published.eagle import read_eagle, theirs
from outrider.heads.published.medusa import is_medusa, read_medusa
from outrider.heads.published.networks import make_published


def read_head(folder: Path) -> StoredHead:
    """Of Outrider's (`outrider train`), or of another project's. Raises `ModelError`."""
    if _is_ours(folder):
        return StoredHead(*load_head(folder))
    with reading(folder):
        about = read_config(folder)
        weights = read_weights(weights_file(folder))
        stored = (read_medusa if is_medusa(about, weights) else read_eagle)(about, weights)
        _check(stored)
        return stored


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


def _check(stored: StoredHead) -> None:
    """Raise `ValueError` unless all its parts are of the sizes that its shape says."""
    shape, tokens = stored.config, stored.tokens
    in_order = bool((tokens[1:] > tokens[:-1]).all())
    # A token twice would be drawn with both probabilities and tested with one: the text's law would be another.
    if not len(tokens) or not in_order or int(tokens[0]) < 0 or int(tokens[-1]) >= shape.vocab_size:
        raise ValueError(f"its vocabulary is not one of different tokens among the target's {shape.vocab_size}")
    wanted = {name: tuple(value.shape) for name, value in make_published(shape).state_dict().items()}
    sizes = {name: tuple(value.shape) for name, value in stored.weights.items()}
    if missing := wanted.keys() - sizes.keys():
        raise ValueError(f"it has no {', '.join(sorted(map(theirs, missing))[:3])}")
    if unknown := sizes.keys() - wanted.keys():
        raise ValueError(f"it has weights that are not known here, {', '.join(sorted(map(theirs, unknown))[:3])}")
    wanted |= {name: (shape.width,) if name == "norm" else (len(tokens), shape.width) for name in stored.rows}
    sizes |= {name: tuple(value.shape) for name, value in stored.rows.items()}
    called = {"norm": "norm.weight", "head": "lm_head.weight"}  # of the output layer
    for name, size in wanted.items():
        if sizes[name] != size:
            raise ValueError(f"its {called.get(name) or theirs(name)} is {list(sizes[name])}, and should be {list(size)}")
    own, narrower = stored.embedding, shape.width != shape.target_width
    if own is not None and (own.dim() != 2 or len(own) < shape.vocab_size or own.shape[1] != shape.width):
        raise ValueError(f"its embedding is {list(own.shape)}, and should be {[shape.vocab_size, shape.width]}")
    if narrower and (own is None or not any(name.startswith("head") for name in stored.rows)):
        raise ValueError(f"it is {shape.width} wide, its target {shape.target_width}: it needs embed_tokens and lm_head")
