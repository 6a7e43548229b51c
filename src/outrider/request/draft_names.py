"""What tables and pictures call drafts and set-ups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from outrider.request.draft_specs import split_model


def without_folder(spec: str) -> str:
    """A model's file without the folder that it is in, the options as they are."""
    name, _ = split_model(spec)
    return PurePath(name).name + spec[len(name) :]


def where_apart(short: Mapping[str, str]) -> dict[str, str]:
    """{name: its short form}, the name itself where two have the same one."""
    every = [*short.values()]
    return {name: less if every.count(less) == 1 else name for name, less in short.items()}
