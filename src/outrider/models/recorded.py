"""Recorded passes: the operations of a pass, called by torch's own interpreter instead of the model's Python.

A pass of a few tokens is some two thousand small operations, and the Python between them takes as long as they do: half of a
pass of a small model. Its operations do not depend on the tokens, the context or how many there are of either, so they are
traced once (`pass_graph`), written down (`graph_text`), kept in the cache folder, and called from there on a CPU. They are
the same operations on the same sizes: a recorded pass gives the bits of the ordinary one, and one that does not is not used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.errors import CacheFolderError
from outrider.models.cache_folder import cache_folder
from outrider.models.graph_text import graph_text
from outrider.models.pass_graph import PassInputs, describe_pass, trace_pass

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel

_FORMAT = 2  # to be raised when what is traced changes with neither torch nor transformers
_REFUSED = "refused: "
CHECKED = (1, 3, 2, 8)  # tokens of the passes by which a new recording is compared with ordinary ones
_log = logging.getLogger(__name__)
_jit: Any = torch._C
_interpreter: Any = torch.jit  # parts of which have no types


class RecordedPasses:
    """The passes of a model of up to `WIDEST` tokens a row, handing out the states of some layers."""

    def __init__(self, model: TransformersModel, layers: Sequence[int], alone: Recording) -> None:
        self.layers = tuple(layers)
        self._model = model
        self._alone = alone
        self._several: Recording | None = None
        self._asked = False

    def of(self, rows: int) -> Recording | None:
        """That for so many rows. The one for several is recorded when it is first asked for; None where it can't be."""
        if rows > 1 and not self._asked:
            self._asked = True
            with torch.inference_mode(False):
                self._several = _record(self._model, self.layers, several=True)
        return self._alone if rows == 1 else self._several


class Recording:
    """One recorded pass, of one row or of several."""

    def __init__(self, model: TransformersModel, text: str) -> None:
        self._inputs = PassInputs(model)
        self._call = _jit._create_function_from_graph("recorded_pass", _jit.parse_ir(text))

    def run(self, slots: slice, tokens: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, list[Tensor]]:
        """Score tokens [R, N] of the slots' rows at their positions [R, N]; longest: the last one of any row + 1.

        Returns logits [R, N, V] and the states of the layers, each [R, N, width].
        """
        capacity, read = self._inputs.of(slots, longest)
        with _interpreter.optimized_execution(False):  # nothing fused, nothing made for these sizes
            logits, *states = self._call(longest, capacity, tokens, positions, *read)
        return logits, states


def record_passes(model: TransformersModel, layers: Sequence[int]) -> RecordedPasses | None:
    """The passes of a model on a CPU, read from the cache folder or recorded now; None where it can't be recorded.

    layers: whose states are handed out, `LAST` for those that the head reads. Takes 2 s for 30 layers the first time.
    """
    alone = _record(model, layers, several=False)
    return None if alone is None else RecordedPasses(model, layers, alone)


def _record(model: TransformersModel, layers: Sequence[int], several: bool) -> Recording | None:
    path = _path(model, layers, several)
    kept = _read(path)
    if kept is not None and not kept.startswith(_REFUSED):
        try:
            return Recording(model, kept)
        except RuntimeError as error:  # what was kept has been damaged
            _log.debug("passes of %s are recorded again: %s", model.name, _line(error))
            kept = None
    if kept is None:
        kept = _recorded(model, layers, several)
        _keep(path, kept)
    if kept.startswith(_REFUSED):
        _log.debug("passes of %s are not recorded: %s", model.name, kept.removeprefix(_REFUSED))
        return None
    return Recording(model, kept)


def _recorded(model: TransformersModel, layers: Sequence[int], several: bool) -> str:
    """The text of its pass, or why there is none."""
    try:
        text = graph_text(trace_pass(model, None, layers, several).graph)
        if not _same_bits(model, layers, Recording(model, text), several):
            return _REFUSED + "its recorded passes give other bits"
    except Exception as error:  # models raise anything when they are traced; the ordinary pass is always there
        return _REFUSED + _line(error)
    return text


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@torch.inference_mode()
def _same_bits(model: TransformersModel, layers: Sequence[int], recording: Recording, several: bool) -> bool:
    """Whether passes of several widths one after the other, and so what they leave in the cache, agree to the bit."""
    most = model.max_length or sum(CHECKED) + 1
    widths = [width for i, width in enumerate(CHECKED) if 1 + sum(CHECKED[: i + 1]) <= most]
    trial = _Trial(model, layers, recording)
    ordinary, recorded = (_scored(model, each, widths, 3 if several else 1) for each in (None, trial))
    return trial.asked == len(widths) and all(torch.equal(a, b) for a, b in zip(ordinary, recorded, strict=True))


class _Trial(RecordedPasses):
    """One recording, whatever the number of rows."""

    asked = 0

    def of(self, rows: int) -> Recording:
        del rows
        self.asked += 1
        return self._alone


def _scored(model: TransformersModel, passes: RecordedPasses | None, widths: list[int], rows: int) -> list[Tensor]:
    """The logits of these passes over rows of different lengths, and what the last layer kept of them."""
    before = model.recorded, model.compiled
    model.recorded, model.compiled = None, None
    sequences = [model.open(sum(widths) + 1) for _ in range(rows)]
    longest = sum(widths)
    tokens = torch.tensor([[(7 * i + 3 + row) % min(model.vocab_size, 50) for i in range(longest)] for row in range(rows)])
    try:
        if rows > 1:  # the first row is shorter than the others
            model.score(sequences[1:], tokens[1:, :1], [1] * (rows - 1), "none")
        model.recorded = passes
        found, at = [], 0
        for width in widths:
            logits = model.score(sequences, tokens[:, at : at + width], [width] * rows)
            assert logits is not None
            found.append(logits)
            at += width
        held = model.cache_rows(slice(sequences[0].slot, sequences[-1].slot + 1))[-2:]
        return [*found, *(layer[:, :, :at].clone() for layer in held)]
    finally:
        for sequence in sequences:
            sequence.close()
        model.recorded, model.compiled = before


def _path(model: TransformersModel, layers: Sequence[int], several: bool) -> Path | None:
    about = [_FORMAT, tuple(layers), several, torch.backends.cpu.get_cpu_capability(), *describe_pass(model)]
    try:
        return cache_folder() / "recorded" / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:24]}.txt"
    except CacheFolderError as error:
        _log.debug("recorded passes of %s are not kept: %s", model.name, error)
        return None


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text() or None
    except (OSError, ValueError):
        return None


def _keep(path: Path | None, text: str) -> None:
    """Beside its place first, so that nobody reads half of it."""
    if path is None:
        return
    try:
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        _log.debug("recorded passes are not kept: %s", error)
