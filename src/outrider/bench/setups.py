"""Outrider in several set-ups, in one run: engines, dtypes and drafts beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.bench.contest import Contender, ours
from outrider.drafters import Drafter
from outrider.errors import ParameterError
from outrider.models.base import TextModel
from outrider.request.draft_names import where_apart, without_folder


@dataclass(frozen=True)
class Setup:
    """A target's dtype and engine, and the specs of its drafters. name: as it was given."""

    name: str
    dtype: str
    engine: str
    drafts: tuple[str, ...]


def parse_setup(text: str) -> Setup:
    """DTYPE[@ENGINE][ + DRAFT]…, for example "int8 + prompt-lookup" or "int8@openvino"."""
    model, plus, rest = text.partition("+")
    dtype, at, engine = model.strip().partition("@")
    drafts = tuple(draft.strip() for draft in rest.split(" + ")) if plus else ()
    if not dtype or not all(drafts) or (at and not engine):
        raise ParameterError(f"setup must be DTYPE[@ENGINE][ + DRAFT]…, got {text!r}: for example 'int8 + prompt-lookup'")
    return Setup(text.strip(), dtype, engine or "auto", drafts)


def short_names(setups: Sequence[Setup]) -> list[str]:
    """What tables and pictures call them: without the folders of files, where that leaves them apart."""
    names = [setup.name for setup in setups]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ParameterError(f"setup must be given once each, got {twice!r} twice: leave one out")
    return [*where_apart({setup.name: _short(setup) for setup in setups}).values()]


def _short(setup: Setup) -> str:
    """The name, each draft's folder left out."""
    return " + ".join([setup.name.partition("+")[0].strip(), *map(without_folder, setup.drafts)])


def contenders(
    setups: Sequence[Setup], load: Callable[[Setup], TextModel], load_draft: Callable[[Setup, TextModel], Drafter]
) -> tuple[dict[str, Contender], TextModel]:
    """A contender per set-up, and one of the targets. Targets of one dtype and engine are loaded once."""
    targets: dict[tuple[str, str], TextModel] = {}
    found = {}
    for setup, name in zip(setups, short_names(setups), strict=True):
        key = (setup.dtype, setup.engine)
        if key not in targets:
            targets[key] = load(setup)
        found[name] = ours(targets[key], load_draft(setup, targets[key]) if setup.drafts else None)
    return found, next(iter(targets.values()))
