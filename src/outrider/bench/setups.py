"""Outrider in several set-ups, in one run: engines, dtypes and drafts beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.bench.contest import Contender, ours
from outrider.drafters import Drafter
from outrider.errors import ParameterError
from outrider.models.base import TextModel


@dataclass(frozen=True)
class Setup:
    """A target's dtype and engine, and a drafter's spec or None."""

    name: str
    dtype: str
    engine: str
    draft: str | None


def parse_setup(text: str) -> Setup:
    """DTYPE[@ENGINE][ + DRAFT], for example "int8 + prompt-lookup" or "int8@openvino"."""
    model, plus, draft = text.partition("+")
    dtype, at, engine = model.strip().partition("@")
    if not dtype or (plus and not draft.strip()) or (at and not engine):
        raise ParameterError(f"setup must be DTYPE[@ENGINE][ + DRAFT], got {text!r}: for example 'int8 + prompt-lookup'")
    return Setup(text.strip(), dtype, engine or "auto", draft.strip() or None)


def contenders(
    setups: Sequence[Setup], load: Callable[[Setup], TextModel], load_draft: Callable[[Setup, TextModel], Drafter]
) -> tuple[dict[str, Contender], TextModel]:
    """A contender per set-up, and one of the targets. Targets of one dtype and engine are loaded once."""
    targets: dict[tuple[str, str], TextModel] = {}
    found = {}
    for setup in setups:
        key = (setup.dtype, setup.engine)
        if key not in targets:
            targets[key] = load(setup)
        found[setup.name] = ours(targets[key], None if setup.draft is None else load_draft(setup, targets[key]))
    return found, next(iter(targets.values()))
