"""Draft heads on the target's last hidden state: one layer that goes on by itself, or independent heads a position.

Each round the head reads the states that the target's last pass left for the positions now certain, and drafts from the
newest token on. The law of a drafted token is the head's own, over its own vocabulary and zero elsewhere, standardised like
any other; it depends on certain positions and on drafted tokens only, so the ratio rule holds unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Many
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TypeGuard

from outrider.costs import DraftSeconds, measured_costs
from outrider.draft_length.base import Prospect
from outrider.drafters.base import DraftContext
from outrider.drafters.model import ModelDrafter
from outrider.errors import ModelError, ParameterError
from outrider.heads.blockwise import BlockwiseModel
from outrider.heads.config import CONFIG, load_config
from outrider.heads.engine import HeadModel, HeadSequence
from outrider.heads.opening import check_dtype, open_head
from outrider.heads.published.checkpoint import find_folder
from outrider.heads.reading import ReadingModel
from outrider.heads.stored import read_head, read_shape
from outrider.models.base import HandsOutStates, LanguageModel, has_encoder
from outrider.models.states_model import no_further_states
from outrider.prefill import prefill
from outrider.proposal import DraftRow

SHIPPED = "heads/shipped"  # in the package: a folder a target
_WRITTEN_AS = re.compile(r"([.-](gguf|q[2-8]\w*|iq[1-4]\w*|(f|fp|bf|float|bfloat)(16|32)))+$", re.IGNORECASE)


class HeadDrafter(ModelDrafter):
    """path: the folder of a head (`outrider train head`, `train blocks`), or of an EAGLE, EAGLE-3 or Medusa checkpoint, or
    the name of one on the hub; None for the one shipped for the target.

    step_seconds: what a drafted token costs, if it need not be measured. dtype: of its weights, float (the type of the
    target's states), int8, or auto (`heads.opening.HEAD_DTYPES`).

    A row's state is its sequence in the head. It holds a prefix of the row's tokens, all of them scored with the target's
    states; what was scored with the head's own is forgotten after the round.
    """

    model: HeadModel
    # Poor on many texts, and hopeless on few (EXPERIMENTS.md, by replays of the shipped head on 52 texts).
    first, later, tests = 0.6, 0.55, 8.0

    def __init__(self, path: str | Path | None = None, step_seconds: float | None = None, dtype: str = "auto") -> None:
        check_dtype(dtype)
        self._dtype = dtype
        self._path = None if path is None else find_folder(path)
        if self._path is not None:
            read_head(self._path)  # what can't be read is said before a target is loaded or bound
        self._target: LanguageModel | None = None
        self.sampling = None
        self._given = step_seconds
        self._costs = None
        whose = "head" if path is None else f"head:{Path(path).name}"
        self.name = whose if dtype == "auto" else f"{whose} ({dtype})"

    def bind(self, target: LanguageModel) -> None:
        if target is self._target:
            return
        if not _hands_out_states(target):
            raise ModelError(
                f"head can't draft for {target.name}: it reads hidden states, which decoder-only models of the engines "
                "transformers and openvino hand out; use one of these, or name another draft"
            )
        self.model = open_head(target, self._path or shipped_head(target), self._dtype)
        self._costs = None
        self._target = target

    def measure(self) -> None:
        if self._given is None:
            self._costs = measured_costs(self.model)

    @property
    def seconds(self) -> DraftSeconds:
        if self._given is not None:
            return DraftSeconds(self._given)
        own = super().seconds
        return DraftSeconds(start=own.of(1)) if self._in_one_pass else own  # the first token pays for all of them

    @property
    def _in_one_pass(self) -> bool:
        return self._target is not None and isinstance(self.model, BlockwiseModel)

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        for row in rows:
            row.state = self.model.open_on(row.sequence)
        if context.late:
            return
        ready = [row for row in rows if row.sequence.length >= len(row.tokens) - 1]
        with context.clock.phase("prefill"):
            prefill(self.model, [row.state for row in ready], [row.tokens[:-1] for row in ready])

    def _prospect(self, pending: int, held: int, room: int) -> Prospect:
        prospect = super()._prospect(pending, held, room)
        return replace(prospect, gated=False) if self._in_one_pass else prospect

    def _seconds(self, pending: int, held: int) -> tuple[float, float, float]:
        """See `ModelDrafter`; the first token pays for all of them where they come in one pass."""
        if self._given is not None:
            return self._given, 0.0, 0.0
        step, start, behind = super()._seconds(pending, held)
        return (0.0, start + step, behind) if self._in_one_pass else (step, start, behind)

    def _room(self, row: DraftRow) -> int:
        """Nothing while the target has not scored all but the newest token: the state before it is not there yet."""
        if row.sequence.length < len(row.tokens) - 1:
            return 0
        return min(super()._room(row), self.model.config.blocks) if self._in_one_pass else super()._room(row)

    def observe(self, rows: Many[DraftRow]) -> None:
        for row in rows:
            state: HeadSequence = row.state
            state.truncate(min(state.sure, len(row.tokens) - 1))

    def reader(self) -> LanguageModel:
        return ReadingModel(self.model)


def _hands_out_states(target: LanguageModel) -> TypeGuard[HandsOutStates]:
    return isinstance(target, HandsOutStates) and not has_encoder(target)


def comes_with_head(target: LanguageModel) -> bool:
    """Whether a draft head for this target comes with the package, and can read its states as it was loaded."""
    found = _head_for(target)
    if found is None or not _hands_out_states(target):
        return False
    shape = load_config(found)
    same = (target.state_size, target.vocab_size) == (shape.target_width, shape.vocab_size)
    if not same or not all(layer < target.num_layers for layer in shape.layers):  # another model of that name
        return False
    compiled = getattr(target, "compiled", None) is not None  # its passes hand out the last states alone
    return not (compiled and shape.layers)


def check_compiled(path: str | Path | None, target: str) -> None:
    """Raise `ParameterError` if a head can't draft for a compiled target: known before the minutes that compiling takes.

    path: as `HeadDrafter` takes it. target: the name that the target will have (`names.name_of`).
    """
    folder = find_shipped_head(target) if path is None else find_folder(path)
    if folder is None:  # which the drafter refuses, whatever is compiled
        return
    shape = read_shape(folder)
    if shape.layers or (shape.published is not None and shape.published.reads):
        raise ParameterError(no_further_states(shape.layers))


def find_shipped_head(target: str) -> Path | None:
    """The folder of the head that comes with this package for a target of that name, None if there is none.

    Names that differ in who published the model and in what its weights were written as are of one model: a head goes with
    all of these, if better with those that it was trained on.
    """
    folder = Path(str(resources.files("outrider"))) / SHIPPED
    every = (config.parent for config in sorted(folder.glob(f"*/{CONFIG}")))
    return next((one for one in every if _model_of(load_config(one).target) == _model_of(target)), None)


def _model_of(name: str) -> str:
    """A model's name without its publisher, its folder and the type of its weights."""
    return _WRITTEN_AS.sub("", name.rstrip("/").rsplit("/", 1)[-1]).lower()


def _head_for(target: LanguageModel) -> Path | None:
    """By the target's name, or by where a module that was loaded by transformers came from."""
    came_from = getattr(getattr(target, "module", None), "name_or_path", "")
    return find_shipped_head(target.name) or (find_shipped_head(came_from) if came_from else None)


def shipped_head(target: LanguageModel) -> Path:
    """The same; raises `ModelError` if there is none."""
    found = _head_for(target)
    if found is not None:
        return found
    raise ModelError(
        f"no draft head comes with Outrider for {target.name}: train one with outrider train head and name its folder, "
        "draft head:path=FOLDER"
    )
