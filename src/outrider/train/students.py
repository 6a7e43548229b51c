"""From data and a target to a student in a folder: an ordinary model with the target's tokenizer, for `--draft FOLDER`.

Two kinds: `shallow`, the target's first layers, and `narrow`, another model of its family with fewer neurons.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.base import TextModel
from outrider.models.cut_head import DRAFT_TOKENS
from outrider.models.pretrained import without_bars
from outrider.models.transformers_model import TransformersModel
from outrider.support.checks import check_count
from outrider.train.checkpoints import CHECKPOINTS
from outrider.train.fused import Rows, summed
from outrider.train.losses import Loss
from outrider.train.make import Data, drafted_tokens, kept_dtype
from outrider.train.narrow import NarrowStudent, check_body, make_narrow, no_bar, weights_digest
from outrider.train.run import Report, RunSettings, processes, train
from outrider.train.shallow import ShallowStudent, check_shallow, make_shallow
from outrider.train.states import Bar, digest
from outrider.train.trainee import Trainee, counts

LAYERS = 4
SAMPLE = 16  # windows that a map is fitted on at least
POSITIONS_A_COLUMN = 20  # that a map is fitted on
POSITIONS = 24576  # that neurons are chosen on


@dataclass(frozen=True)
class StudentSettings:
    """layers: the target's first ones. intermediate_size: neurons of each layer of another model. One of them, or neither:
    four layers, or all neurons. vocabulary: tokens that the student drafts, None for all of the target's.
    """

    layers: int | None = None
    intermediate_size: int | None = None
    vocabulary: int | None = None
    loss: Loss = "mix"

    def __post_init__(self) -> None:
        for name in ("intermediate_size", "vocabulary"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)

    @property
    def depth(self) -> int:
        """Layers of the target that a shallow student has."""
        return LAYERS if self.layers is None else self.layers

    def what(self, body: str | None) -> str:
        """In words, for the card."""
        if body is None:
            return f"A wide-and-shallow student: the target's first {self.depth} layers, trained, and its embeddings"
        left = "all neurons" if self.intermediate_size is None else f"{self.intermediate_size} neurons"
        return f"A deep-and-narrow student: {Path(body).resolve().name} with {left} in each layer, trained"


class StudentTrainee(Trainee):
    """A model of its own, which drafts tokens [T] of the target's vocabulary."""

    def __init__(
        self, student: ShallowStudent | NarrowStudent, target: TransformersModel, tokens: Tensor, loss: Loss
    ) -> None:
        super().__init__(target, tokens, loss)
        self.network = student
        self.register_buffer("tokens", tokens, persistent=False)

    def forward(self, tokens: Tensor, states: Tensor, normalisers: Tensor, drafted: Tensor) -> dict[str, Any]:
        """As `HeadTrainee.forward`, one depth."""
        counted = torch.ones_like(drafted) if self.training else drafted
        positions = counted.sum().unsqueeze(0)
        weights = counted.flatten().unsqueeze(0) / positions.clamp(min=1)
        predicted = self.network(tokens).flatten(0, 1).unsqueeze(0)
        sums = summed(predicted, self._head(), self.laws(states, normalisers), weights, self.loss)
        return {"loss": sums.loss, "counts": counts(sums, positions)}

    def _head(self) -> Rows:
        """That reads the student's states: the target's, or of a narrow one its own, which a checkpoint may have brought."""
        if not isinstance(self.network, NarrowStudent):
            return self.rows()
        own, tokens = self.network.module.get_output_embeddings(), self.get_buffer("tokens")
        if len(tokens) == len(own.weight):
            return Rows(own.weight, own.bias)
        return Rows(own.weight[tokens], None if own.bias is None else own.bias[tokens])


def check_student(target: TransformersModel, settings: StudentSettings, body: TextModel | None) -> None:
    """Raise `ParameterError` or `ModelError` where there can be none of that kind."""
    if body is not None:
        if settings.layers is not None:
            raise ParameterError(f"layers are the target's first ones: leave them out beside body, got {settings.layers}")
        check_body(target, body, settings.intermediate_size)
        if (settings.vocabulary or 0) > body.vocab_size:
            raise ParameterError(
                f"vocabulary must be {body.vocab_size} or less, the tokens of {body.name}, got {settings.vocabulary}"
            )
        return
    if settings.intermediate_size is not None:
        raise ParameterError("intermediate_size is of the model that body names: name one, or give layers instead")
    check_shallow(target, settings.depth)


def train_student(
    target: TransformersModel,
    data: Data,
    settings: StudentSettings,
    run: RunSettings,
    output: Path,
    body: TransformersModel | None = None,
    bar: Bar = no_bar,
) -> tuple[int, Report]:
    """Train a student and save it as an ordinary transformers model with the target's tokenizer.

    body: the model that a narrow one is made of; it is used up. Without it the student has the target's width and its first
    layers (Chen Table 2). Both read all tokens; embeddings and the head's rows stay as they are. bar: of the narrowing.
    → the tokens that it drafts, the report
    """
    check_student(target, settings, body)
    torch.manual_seed(run.seed)
    begun = _shallow(target, data, settings) if body is None else _narrow(body, data, settings, run, bar)
    del body
    size = min(target.vocab_size, begun.rows)
    every = begun.rows == size and (settings.vocabulary is None or settings.vocabulary >= size)
    tokens = torch.arange(size) if every else drafted_tokens(target, data, settings.vocabulary or size, size)
    trainee = StudentTrainee(begun.student, target, tokens, settings.loss)
    about = {**data.about, "kind": "student", **asdict(settings), **begun.about}
    report = train(trainee, data.train, data.held_out, output / CHECKPOINTS, run, about)
    if processes().is_main_process:
        whole = begun.student.whole()
        setattr(whole.config, DRAFT_TOKENS, None if every else tokens.tolist())
        with without_bars():
            whole.to(begun.dtype).save_pretrained(output)
        target.tokenizer.save_pretrained(output)
    return len(tokens), report


@dataclass(frozen=True)
class _Begun:
    """A student before its training. rows: of its head, for the tokens 0 … rows - 1. dtype: that it is saved in. about: what
    it was made of.
    """

    student: ShallowStudent | NarrowStudent
    rows: int
    dtype: torch.dtype
    about: dict[str, object]


def _shallow(target: TransformersModel, data: Data, settings: StudentSettings) -> _Begun:
    """Its map is fitted on windows that are spread over the data."""
    student = make_shallow(target, settings.depth)
    chosen = data.train.spread(max(SAMPLE, POSITIONS_A_COLUMN * target.state_size // len(data.train.tokens(0))))
    windows = (data.train[number] for number in chosen)
    student.fit((window["tokens"], window["states"]) for window in windows)
    return _Begun(student, target.vocab_size, kept_dtype(target), {"layers": settings.depth})


def _narrow(body: TransformersModel, data: Data, settings: StudentSettings, run: RunSettings, bar: Bar) -> _Begun:
    """Its neurons are chosen on windows that are spread over the data; a checkpoint to go on from has chosen them."""
    length = len(data.train.tokens(0))
    if body.max_length is not None and length > body.max_length:
        raise ParameterError(f"length must be at most the {body.max_length} positions of {body.name}")
    about: dict[str, object] = {"body": f"{digest(body.fingerprint)} {weights_digest(body.module)}"}
    rows, dtype = body.vocab_size, kept_dtype(body)
    windows = [] if run.resume else [data.train.tokens(number) for number in data.train.spread(POSITIONS // length)]
    return _Begun(make_narrow(body, settings.intermediate_size, windows, bar), rows, dtype, about)
