"""Recorded or captured passes of an autoregressive head for one row: it is called once a drafted token.

Two of them: after the target's pass a head reads the target's states, and from then on those that it predicted itself, which
are narrower where it reads states of further layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.models.captured import Captured
from outrider.models.captured_trial import Trial
from outrider.models.cuda_graphs import say_uncaptured
from outrider.models.pass_trial import spread_off
from outrider.models.probe import TOLERANCE
from outrider.models.recording import Recording, changed, record
from outrider.models.shared_keys import WIDEST
from outrider.models.tracing import Inputs, Sizes, Traced, parts_of, trace

if TYPE_CHECKING:
    from outrider.heads.autoregressive import AutoregressiveModel
    from outrider.heads.layers import Attend

CHECKED = (3, 1, 1)  # tokens of the passes by which a new recording is compared with ordinary ones
TRIED = (8, 1) * 3  # the same of captured ones: each shape is replayed twice


class NewestToken(nn.Module):
    """A head's network and its rows of the target's head, for what follows the last token alone."""

    def __init__(self, network: nn.Module, rows: nn.Module) -> None:
        super().__init__()
        self.network, self.rows = network, rows

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """As the network takes them → logits [R, 1, T], the state predicted at the last token [R, width]"""
        last = self.network(embeddings, states, positions, attend)[:, -1]
        return self.rows(last.unsqueeze(1)), last


class RecordedHead:
    """By the width of the states that are read."""

    def __init__(self, recordings: dict[int, Recording]) -> None:
        self._recordings = recordings

    def fits(self) -> bool:
        """Whether the head is still the one that was recorded."""
        return all(recording.fits() for recording in self._recordings.values())

    def of(self, tokens: int, states_width: int) -> Recording | None:
        """That of a pass about embeddings [1, N, width], the states before them [1, N, ·] and positions [1, N]."""
        return self._recordings.get(states_width) if tokens <= WIDEST else None


class CapturedHead(Captured["AutoregressiveModel"]):
    """The same on a GPU."""

    def of(self, tokens: int, states_width: int) -> CapturedHead | None:
        """See `RecordedHead`; any width has a graph of its own."""
        del states_width
        return self if tokens <= WIDEST and not self.failed else None


class _TriedHead(CapturedHead):
    """The same on trial."""

    def __init__(self, model: AutoregressiveModel) -> None:
        super().__init__(model, _run)
        self.trial = Trial(CapturedHead(model, _run))

    def run(self, slots: slice, longest: int, *about: Tensor) -> list[Tensor]:
        return self.trial.run(slots, longest, *about)


def record_head(model: AutoregressiveModel) -> RecordedHead | CapturedHead | None:
    """Of a head, None if it can't be recorded or captured."""
    widths = {model.config.states_width, model.config.width}
    _pass(model, None, (1,), model.config.width)  # the cache is made by the first pass, which a recorded one can't be
    if model.device.type == "cuda":
        return _captured(model, widths)
    each = {width: _recorded(model, width) for width in widths}
    return RecordedHead({width: one for width, one in each.items() if one is not None}) if any(each.values()) else None


def _captured(model: AutoregressiveModel, widths: set[int]) -> CapturedHead | None:
    """None where its target's passes are not wanted captured, or, with a warning, where they should not be."""
    if not getattr(model.target, "wants_recorded", True):
        return None
    reason = changed(model.module) or _tried(model, widths)
    if reason:
        say_uncaptured(f"the {model.name}", reason)
        return None
    return CapturedHead(model, _run)


@torch.inference_mode()
def _tried(model: AutoregressiveModel, widths: set[int]) -> str:
    """Why a head's passes should not be captured, empty if they may be: see `captured_trial`."""
    tried = _TriedHead(model)
    try:
        both = [[_pass(model, each, TRIED, width) for each in (None, tried)] for width in sorted(widths)]
    except torch.OutOfMemoryError:
        return "the device has no memory left to try them"
    off = max(spread_off(a, b) for wanted, got in both for a, b in zip(wanted, got, strict=True))
    if reason := tried.trial.verdict(model.dtype):
        return reason
    if off <= TOLERANCE.get(model.dtype, 0.15):
        return ""
    return f"they give other logits than ordinary passes, off by {off:.2g} of their spread"


def _recorded(model: AutoregressiveModel, states_width: int) -> Recording | None:
    what = (json.dumps(asdict(model.config)), model.dtype_name, states_width, *parts_of(model.module).describe())
    return record(
        model, model.name, what, lambda: _traced(model, states_width), lambda found: _agrees(model, found, states_width)
    )


def _traced(model: AutoregressiveModel, states_width: int) -> Traced:

    def about(of: Sizes) -> list[Tensor]:
        widths = (model.config.width, states_width)
        given = [torch.empty((of.rows, of.tokens, width), dtype=model.dtype) for width in widths]
        return [*given, torch.empty((of.rows, of.tokens), dtype=torch.long)]

    return trace(partial(_run, model), about, model, None)


def _run(model: AutoregressiveModel, given: Inputs) -> tuple[Tensor, ...]:
    """The pass that is traced, or captured."""
    embeddings, states, at = given.about
    (layer,) = given.layers(at)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = layer.update(keys, values)
        return model.attention(queries, keys, values, model.mask(at, given.columns))

    out: tuple[Tensor, Tensor] = torch.func.functional_call(model.module, given.tensors, (embeddings, states, at, attend))
    return out


@torch.inference_mode()
def _agrees(model: AutoregressiveModel, recording: Recording, states_width: int) -> bool:
    """Whether passes of several tokens and of one, one after the other, agree to the bit."""
    wanted, got = (_pass(model, each, CHECKED, states_width) for each in (None, recording))
    return all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@torch.inference_mode()
def _pass(
    model: AutoregressiveModel, recording: Recording | CapturedHead | None, widths: Sequence[int], states_width: int
) -> list[Tensor]:
    """What passes of so many tokens after each other give, by the recording or as ever."""
    generator = torch.Generator().manual_seed(0)
    sequence = model.open(sum(widths))
    out: list[Tensor] = []
    try:
        for width in widths:
            sizes = ((1, width, model.config.width), (1, width, states_width))
            embeddings, states = (torch.randn(size, generator=generator).to(model.device, model.dtype) for size in sizes)
            at = sequence.length
            positions = torch.arange(at, at + width, device=model.device).unsqueeze(0)
            out += model.newest(sequence, embeddings, states, positions, recording)
            sequence.advance(width)
    finally:
        sequence.close()
    return out
