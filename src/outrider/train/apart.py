"""No text twice: what is held out is not trained on, and what is trained on lies neither in two sources nor in the output.

Files are compared as the file system does (device and inode), so that links and other spellings of a path don't matter.
Copies of a text under another name are not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from outrider.errors import ParameterError
from outrider.train.corpus import DATASET, files_of

Identity = tuple[object, ...]


def check_apart(sources: Iterable[str], held_out: Mapping[str, str]) -> None:
    """Raise `ParameterError`, naming the text, if two of the sources, or a source and a held-out one, share a text.

    sources: as in `corpus.Source.name`. held_out: domain → the same.
    """
    seen: dict[Identity, str] = {}
    for source in sources:
        found = _identities(source)
        _refuse(found, seen, f"data {source} and data", "give it once")
        seen |= dict.fromkeys(found, source)
    for domain, place in held_out.items():
        _refuse(_identities(place), seen, f"held-out {domain}={place} and data", "move it out of the data")


def check_outside(sources: Iterable[str], folders: Iterable[Path]) -> None:
    """Raise `ParameterError` if what a run writes would be read as its data."""
    places = [Path(source).expanduser().resolve() for source in sources if not source.startswith(DATASET)]
    for folder in folders:
        for place in places:
            if folder.expanduser().resolve().is_relative_to(place):
                raise ParameterError(f"output and cache must lie outside the data, got {folder} in {place}: name another")


def _refuse(found: dict[Identity, str], seen: dict[Identity, str], who: str, remedy: str) -> None:
    shared = next((identity for identity in found if identity in seen), None)
    if shared is not None:
        raise ParameterError(f"{who} {seen[shared]} must not share a text, both have {found[shared]}: {remedy}")


def _identities(source: str) -> dict[Identity, str]:
    """What tells its texts from others → how they are called."""
    if source.startswith(DATASET):
        name, *options = source.split(",")
        return {(name, *sorted(options)): source}
    return {((status := file.stat()).st_dev, status.st_ino): str(file) for file in files_of(source)}
