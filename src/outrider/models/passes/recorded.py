"""Recorded passes of a model of transformers, of one row and of several (`recording`).

A pass of a few tokens is some two thousand small operations, and the Python between them takes as long as they do: half of a
pass of a small model. The operations do not depend on the tokens, the context or how many there are of either, so they are
recorded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.models.base import has_encoder, open_sequence
from outrider.models.passes.graph import describe_pass, trace_pass
from outrider.models.passes.recording import Recording, record
from outrider.support.device_data import pad_rows

if TYPE_CHECKING:
    from outrider.models.passes.captured import CapturedPasses
    from outrider.models.transformers_model import TransformersModel

CHECKED, BEFORE = (3, 1, 2, 8, 1), 90  # tokens of the passes by which a new recording is compared with ordinary ones, and
# those before them: of few keys some kernels see no difference
CHECKED_AGAIN, BEFORE_AGAIN = (2, 1), 16  # the same of one that was kept, in each start
STATES_AGAIN = (2, 1, 3, 1)  # where states are kept: going on from what was left, and from the middle


class RecordedPasses:
    """Of up to `WIDEST` tokens a row. They hand out logits [R, N, V] and the states of `layers`, each [R, N, width].

    Recurrent layers take a token alone by other operations than several, so that their models have a recording for each.
    """

    def __init__(self, model: TransformersModel, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._model = weakref.ref(model)  # which has these
        self._lone_apart = model.keeps_states
        self._made: dict[_Kind, Recording | None] = {}

    def fits(self) -> bool:
        """Whether the model is still the one that was recorded."""
        return all(recording is None or recording.fits() for recording in self._made.values())

    @property
    def flat(self) -> bool:
        """Whether the one for one row is for the tokens of several sequences, too."""
        alone = self._made.get(_Kind())
        return alone is not None and alone.in_one_call

    def of(self, rows: int, width: int) -> Recording | None:
        """That for so many rows of so many tokens. It is recorded when it is first asked for; None where it can't be."""
        kind = _Kind(several=rows > 1 and not self.flat, lone=width == 1 and self._lone_apart)
        if kind not in self._made:
            model = self._model()
            assert model is not None
            self._made[kind] = _recorded(model, self.layers, kind)
        return self._made[kind]


@dataclass(frozen=True)
class _Kind:
    """Of passes that a recording is for: of several rows, of a lone token a row."""

    several: bool = False
    lone: bool = False


def record_passes(model: TransformersModel, layers: Sequence[int]) -> RecordedPasses | None:
    """The passes of a model on a CPU, read from the cache folder or recorded now; None where it can't be recorded.

    layers: whose states are handed out, `LAST` for those that the head reads. Takes 2 to 7 s for 30 layers the first time.
    """
    passes = RecordedPasses(model, layers)
    made = [passes.of(1, width) for width in (2, 1)]
    return None if made == [None, None] else passes


def _recorded(model: TransformersModel, layers: Sequence[int], kind: _Kind) -> Recording | None:
    def agree(tried: Sequence[int], before: int) -> Callable[[Recording], bool]:
        widths = [width for width in tried if not model.keeps_states or (width == 1) is kind.lone]
        return lambda recording: all(
            _same_bits(model, layers, recording, beside, widths, before)
            for beside in ((False, True) if recording.in_one_call else (kind.several,))
        )

    return record(
        model,
        model.name,
        (tuple(layers), kind, *describe_pass(model)),
        lambda: trace_pass(model, 1 if kind.lone else None, layers, kind.several),
        agree(CHECKED, BEFORE),
        agree(STATES_AGAIN if model.keeps_states else CHECKED_AGAIN, BEFORE_AGAIN) if model.looks_again else lambda _: True,
    )


@torch.inference_mode()
def _same_bits(
    model: TransformersModel, layers: Sequence[int], recording: Recording, several: bool, tried: Sequence[int], after: int
) -> bool:
    """Whether passes of these widths one after the other, and what they leave in the cache, agree to the bit.

    With a cache of their own: the model's would grow by the rows of the trial.
    """
    most = (model.max_length or after + sum(tried) + 1) - 1
    widths = [width for i, width in enumerate(tried) if sum(tried[: i + 1]) <= most]
    before = min(after, most - sum(widths))
    twins = model.with_a_cache_of_its_own(), model.with_a_cache_of_its_own()
    trial = _Trial(twins[1], layers, recording.of_twin(twins[1]))
    ordinary = scored(twins[0], None, widths, 3 if several else 1, layers, before)
    recorded = scored(twins[1], trial, widths, 3 if several else 1, layers, before)
    passes = len(widths) + int(model.keeps_states or not (has_encoder(model) or model.quantized))
    return trial.asked == passes and all(torch.equal(a, b) for a, b in zip(ordinary, recorded, strict=True))


class _Trial(RecordedPasses):
    """One recording, whatever the number of rows and tokens."""

    def __init__(self, model: TransformersModel, layers: Sequence[int], recording: Recording) -> None:
        super().__init__(model, layers)
        self._made[_Kind()] = recording
        self._recording = recording
        self.asked = 0

    def of(self, rows: int, width: int) -> Recording:
        del rows, width
        self.asked += 1
        return self._recording


def scored(
    model: TransformersModel,
    passes: RecordedPasses | CapturedPasses | None,
    widths: Sequence[int],
    rows: int,
    layers: Sequence[int],
    before: int,
) -> list[Tensor]:
    """The logits of these passes over rows of different lengths, what the last layer kept of them, and the states.

    before: tokens of the first row; others have one more each, if there is room. The last pass once more: with alternatives,
    where there may be any; from the state in its middle, where states are kept.
    """
    source = model.stand_in() if has_encoder(model) else None
    most = before + sum(widths)
    lengths = [min(before + row, (model.max_length or most + rows) - sum(widths)) for row in range(rows)]
    sequences: list[Any] = [open_sequence(model, source, most + rows) for _ in range(rows)]
    ids = [[(7 * i + 3 + row) % min(model.vocab_size, 50) for i in range(most + rows)] for row in range(rows)]
    tokens, _ = pad_rows(ids, model.device)
    try:
        if before:
            model.score(sequences, tokens[:, : max(lengths)], lengths, "none")
        model.recorded = passes
        found, at = [], before
        for width in widths:
            logits = model.score(sequences, tokens[:, at : at + width], [width] * rows)
            assert logits is not None
            found.append(logits)
            at += width
        if model.keeps_states:
            back = max(widths[-1] // 2, min(widths[-1], 2))
            for sequence in sequences:
                sequence.truncate(sequence.length - back)
            again_from = model.score(sequences, tokens[:, at - back : at], [back] * rows)
            assert again_from is not None
            found.append(again_from)
        elif not (has_encoder(model) or model.quantized):
            for sequence in sequences:
                sequence.truncate(sequence.length - widths[-1])
            again, others = tokens[:, at - widths[-1] : at], tokens[:, :3]
            found.append(model.score_beside(sequences, again, [widths[-1]] * rows, others, [[0] * 3] * rows))
        states = [model._cache.states[layer].keys for layer in layers]
        held = [*model.cache_rows(slice(0, rows))[-2:], *(kept[:rows] for kept in states if kept is not None)]
        return [*found, *(kept[:, :, :at].clone() for kept in held)]
    finally:
        for sequence in sequences:  # which would hold the model in a cycle
            sequence.close()
