"""Recorded passes: the operations of a pass of one row, called by torch's own interpreter instead of the model's Python.

A pass of a few tokens is some two thousand small operations, and the Python between them takes as long as they do: half of a
pass of a small model. Its operations do not depend on the tokens, the context or the number of tokens, so they are traced
once (`pass_graph`), written down (`graph_text`), kept in the cache folder, and called from there on a CPU. They are the
same operations on the same sizes: a recorded pass gives the bits of the ordinary one, and one that does not is not used.
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

_FORMAT = 1  # to be raised when what is traced changes with neither torch nor transformers
_REFUSED = "refused: "
CHECKED = (1, 3, 2, 8)  # tokens of the passes by which a new recording is compared with ordinary ones
_log = logging.getLogger(__name__)
_jit: Any = torch._C
_interpreter: Any = torch.jit  # parts of which have no types


class RecordedPasses:
    """The passes of a model of up to `WIDEST` tokens of one row, handing out the states of some layers."""

    def __init__(self, model: TransformersModel, text: str, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._inputs = PassInputs(model)
        self._run = _jit._create_function_from_graph("recorded_pass", _jit.parse_ir(text))

    def run(self, slot: int, tokens: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, list[Tensor]]:
        """Score tokens [1, N] of a slot's row at its positions [1, N]; longest: the last one + 1.

        Returns logits [1, N, V] and the states of `layers`, each [1, N, width].
        """
        given = self._inputs.of(slot, longest)
        with _interpreter.optimized_execution(False):  # nothing fused, nothing made for these sizes
            logits, *states = self._run(longest, given[0], tokens, positions[0], *given[1:])
        return logits, states


def record_passes(model: TransformersModel, layers: Sequence[int]) -> RecordedPasses | None:
    """The passes of a model on a CPU, read from the cache folder or recorded now; None where it can't be recorded.

    layers: whose states are handed out, `LAST` for those that the head reads. Takes 2 s for 30 layers the first time.
    """
    path = _path(model, layers)
    kept = _read(path)
    if kept is not None and not kept.startswith(_REFUSED):
        try:
            return RecordedPasses(model, kept, layers)
        except RuntimeError as error:  # what was kept has been damaged
            _log.debug("passes of %s are recorded again: %s", model.name, _line(error))
            kept = None
    if kept is None:
        kept = _recorded(model, layers)
        _keep(path, kept)
    if kept.startswith(_REFUSED):
        _log.debug("passes of %s are not recorded: %s", model.name, kept.removeprefix(_REFUSED))
        return None
    return RecordedPasses(model, kept, layers)


def _recorded(model: TransformersModel, layers: Sequence[int]) -> str:
    """The text of its pass, or why there is none."""
    try:
        text = graph_text(trace_pass(model, None, layers).graph)
        if not _same_bits(model, RecordedPasses(model, text, layers)):
            return _REFUSED + "its recorded passes give other bits"
    except Exception as error:  # models raise anything when they are traced; the ordinary pass is always there
        return _REFUSED + _line(error)
    return text


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@torch.inference_mode()
def _same_bits(model: TransformersModel, passes: RecordedPasses) -> bool:
    """Whether passes of several widths one after the other, and so what they leave in the cache, agree to the bit."""
    most = model.max_length or sum(CHECKED)
    widths = [width for i, width in enumerate(CHECKED) if sum(CHECKED[: i + 1]) <= most]
    tokens = torch.tensor([[(7 * i + 3) % min(model.vocab_size, 50) for i in range(sum(CHECKED))]])
    ordinary, recorded = (_scored(model, each, tokens, widths) for each in (None, passes))
    return all(torch.equal(a, b) for a, b in zip(ordinary, recorded, strict=True))


def _scored(model: TransformersModel, passes: RecordedPasses | None, tokens: Tensor, widths: list[int]) -> list[Tensor]:
    """The logits of these passes, and what the last layer kept of them."""
    before = model.recorded, model.compiled
    model.recorded, model.compiled = passes, None
    sequence = model.open(sum(widths))
    try:
        found = []
        for width in widths:
            at = sequence.length
            logits = model.score([sequence], tokens[:, at : at + width], [width])
            assert logits is not None
            found.append(logits)
        return [*found, *(held[:, :, : sequence.length].clone() for held in model.cache_row(sequence.slot)[-2:])]
    finally:
        sequence.close()
        model.recorded, model.compiled = before


def _path(model: TransformersModel, layers: Sequence[int]) -> Path | None:
    about = [_FORMAT, tuple(layers), torch.backends.cpu.get_cpu_capability(), *describe_pass(model)]
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
