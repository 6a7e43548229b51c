"""Recorded or captured passes of an autoregressive head for one row: it is called once a drafted token.

Two of them: after the target's pass a head reads the target's states, and from then on those that it predicted itself, of
which there is one where it reads states of further layers, too. Where the target is a model of transformers, states are read
where it keeps them, and embeddings are looked up in its table in the same pass.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outrider.models.attention.shared_keys import WIDEST
from outrider.models.passes.captured import Captured
from outrider.models.passes.captured_trial import Trial
from outrider.models.passes.cuda_graphs import say_uncaptured
from outrider.models.passes.guards import Sizes
from outrider.models.passes.model_code import describe_code
from outrider.models.passes.recording import Recording, changed, record
from outrider.models.passes.tracing import Inputs, Traced, parts_of, trace

if TYPE_CHECKING:
    from outrider.heads.autoregressive import AutoregressiveModel
    from outrider.heads.layers import Attend

CHECKED = (3, 1, 1)  # tokens of the passes by which a new recording is compared with ordinary ones
TRIED = (8, 1) * 3  # the same of captured ones: each shape is replayed twice


class NewestToken(nn.Module):
    """A head's network, its rows of the target's head, for what follows the last token alone, and its table of embeddings,
    if it has one.
    """

    def __init__(self, network: nn.Module, rows: nn.Module, dtype: torch.dtype, table: nn.Module | None) -> None:
        super().__init__()
        self.network, self.rows, self.table = network, rows, table
        self._dtype = dtype

    def forward(self, tokens: Tensor, states: Sequence[Tensor], positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Tokens int64 [R, N], or their embeddings [R, N, width]; states, beside each other, as the network takes them →
        logits [R, 1, T], the state predicted at the last token [R, 1, width]
        """
        embeddings = tokens if self.table is None else self.table(tokens).to(self._dtype)
        every = [state.to(self._dtype) for state in states]
        read = every[0] if len(every) == 1 else torch.cat(every, dim=-1)
        last = self.network(embeddings, read, positions, attend)[:, -1:]
        return self.rows(last), last


Kind = tuple[tuple[int, torch.dtype], ...]
"""Of the states that are read, each one's width and type."""


def kind_of(states: Sequence[Tensor]) -> Kind:
    """Of these."""
    return tuple((state.shape[-1], state.dtype) for state in states)


class RecordedHead:
    """By the kind of the states that are read. module: what was recorded."""

    def __init__(self, module: NewestToken, recordings: dict[Kind, Recording]) -> None:
        self.module = module
        self._recordings = recordings

    def of_twin(self, model: AutoregressiveModel) -> RecordedHead:
        """The same passes for another engine around the same module."""
        make_cache(model)
        return RecordedHead(self.module, {kind: one.of_twin(model) for kind, one in self._recordings.items()})

    def fits(self) -> bool:
        """Whether the head is still the one that was recorded."""
        return all(recording.fits() for recording in self._recordings.values())

    def of(self, states: Sequence[Tensor]) -> Recording | None:
        """That of a pass that reads these states, [1, N, ·] each."""
        found = self._recordings.get(kind_of(states))
        return found if found is not None and (found.in_one_call or states[0].shape[1] <= WIDEST) else None

    @property
    def flat(self) -> bool:
        """Whether a pass may be of several sequences' tokens, one after the other."""
        return all(recording.in_one_call for recording in self._recordings.values())


class CapturedHead(Captured["AutoregressiveModel"]):
    """The same on a GPU."""

    def of(self, states: Sequence[Tensor]) -> CapturedHead | None:
        """See `RecordedHead`; any kind has a graph of its own."""
        return self if states[0].shape[1] <= WIDEST and not self.failed else None


class _TriedHead(CapturedHead):
    """The same on trial."""

    def __init__(self, model: AutoregressiveModel) -> None:
        super().__init__(model, _run)
        self.trial = Trial(CapturedHead(model, _run))

    def run(self, slots: slice, longest: int, *about: Tensor) -> list[Tensor]:
        return self.trial.run(slots, longest, *about)


def make_cache(model: AutoregressiveModel) -> None:
    """The first pass does, which a recorded one can't be."""
    _pass(model, None, (1,), model.own_kind)


def record_head(model: AutoregressiveModel) -> RecordedHead | CapturedHead | None:
    """Of a head, None if it can't be recorded or captured."""
    kinds = [*dict.fromkeys((model.states_kind, model.own_kind))]
    make_cache(model)
    if model.device.type == "cuda":
        return _captured(model, kinds)
    each = {kind: _recorded(model, kind) for kind in kinds}
    found = {kind: one for kind, one in each.items() if one is not None}
    return RecordedHead(model.module, found) if found else None


def _captured(model: AutoregressiveModel, kinds: list[Kind]) -> CapturedHead | None:
    """None where its target's passes are not wanted captured, or, with a warning, where they should not be."""
    if not getattr(model.target, "wants_recorded", True):
        return None
    reason = changed(model.module) or _tried(model, kinds)
    if reason:
        say_uncaptured(f"the {model.name}", reason)
        return None
    return CapturedHead(model, _run)


@torch.inference_mode()
def _tried(model: AutoregressiveModel, kinds: list[Kind]) -> str:
    """Why a head's passes should not be captured, empty if they may be: see `captured_trial`."""
    tried = _TriedHead(model)
    try:
        both = [[_pass(model, each, TRIED, kind) for each in (None, tried)] for kind in kinds]
    except torch.OutOfMemoryError:
        return "the device has no memory left to try them"
    return tried.trial.judged((pair for wanted, got in both for pair in zip(wanted, got, strict=True)), model.dtype)


def _recorded(model: AutoregressiveModel, kind: Kind) -> Recording | None:
    about = [json.dumps(asdict(model.config)), model.dtype_name, str(kind)]
    what = (*about, *describe_code(model.module), *parts_of(model.module).describe())
    return record(model, model.name, what, lambda: _traced(model, kind), lambda found: _agrees(model, found, kind))


def _traced(model: AutoregressiveModel, kind: Kind) -> Traced:

    def about(of: Sizes) -> list[Tensor]:
        shape = (of.rows, of.tokens)
        table, width = model.module.table, model.config.width
        tokens = torch.empty((*shape, width), dtype=model.dtype) if table is None else torch.empty(shape, dtype=torch.long)
        states = [torch.empty((*shape, wide), dtype=dtype) for wide, dtype in kind]
        return [tokens, *states, torch.empty(shape, dtype=torch.long)]

    return trace(partial(_run, model), about, model, None)


def _run(model: AutoregressiveModel, given: Inputs) -> tuple[Tensor, ...]:
    """The pass that is traced, or captured."""
    tokens, *states, at = given.about
    (layer,) = given.layers(at)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = layer.update(keys, values)
        return model.attention(queries, keys, values, model.mask(at, given.columns))

    out: tuple[Tensor, Tensor] = torch.func.functional_call(model.module, given.tensors, (tokens, states, at, attend))
    return out


@torch.inference_mode()
def _agrees(model: AutoregressiveModel, recording: Recording, kind: Kind) -> bool:
    """Whether passes of several tokens and of one, one after the other, agree to the bit."""
    wanted, got = (_pass(model, each, CHECKED, kind) for each in (None, recording))
    return all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@torch.inference_mode()
def _pass(
    model: AutoregressiveModel, recording: Recording | CapturedHead | None, widths: Sequence[int], kind: Kind
) -> list[Tensor]:
    """What passes of so many tokens after each other give, by the recording or as ever."""
    generator = torch.Generator().manual_seed(0)
    sequence = model.open(sum(widths))
    out: list[Tensor] = []
    try:
        for width in widths:
            ids = torch.randint(model.vocab_size, (1, width), generator=generator).to(model.device)
            states = [torch.randn((1, width, wide), generator=generator).to(model.device, dtype) for wide, dtype in kind]
            logits, last = model.newest([sequence], [width], ids, states, recording)
            assert logits is not None
            out += [logits, last]
            sequence.advance(width)
    finally:
        sequence.close()
    return out
