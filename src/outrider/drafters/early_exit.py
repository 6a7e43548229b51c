"""The target's own first layers with its head as the draft: no second model, no second cache.

The layers write keys and values for drafted tokens into the target's own slots; the verification writes the same ones
again, and a roll-back is the target's. How well it drafts depends on training: few checkpoints were made for it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from outrider.checks import check_count
from outrider.draft_length.base import Prospect
from outrider.drafters.base import DraftContext
from outrider.drafters.model import ModelDrafter
from outrider.errors import ModelError, ParameterError
from outrider.models.base import LanguageModel, Sequence
from outrider.models.captured import CapturedPasses
from outrider.models.recorded import RecordedPasses
from outrider.models.slot_cache import StateLayer
from outrider.models.slots import SlotSequence
from outrider.models.transformers_model import TransformersModel, _as_it_is
from outrider.proposal import DraftRow

PRIOR = 0.3  # most checkpoints were not made for it: to be probed before it is used


class EarlyExitDrafter(ModelDrafter):
    """layers: how many of the target's layers draft, a third of them by default."""

    def __init__(self, layers: int | None = None) -> None:
        if layers is not None:
            check_count("layers", layers)
        self._layers = layers
        self._target: LanguageModel | None = None
        self._view: TransformersModel | None = None
        self.sampling = None
        self._costs = None
        self.name = "early-exit"

    def bind(self, target: LanguageModel) -> None:
        if target is self._target:
            return
        if not isinstance(target, TransformersModel) or target.has_encoder:
            wanted = "a decoder-only model of the transformers engine, in one process"
            raise ModelError(f"early-exit can't draft for {target.name}: it needs {wanted}; name another draft")
        total = int(target.module.config.get_text_config().num_hidden_layers)
        layers = self._layers or max(1, total // 3)
        if layers >= total:
            raise ParameterError(f"layers must be below the target's {total}, got {layers}")
        self.model = self._view = first_layers(target, layers)
        self.name = f"early-exit:{layers}"
        self._costs = None
        self._target = target

    def begin(self, rows: Many[DraftRow], context: DraftContext) -> None:
        del context
        assert self._view is not None
        self._view._look_again()  # as the target does when a sequence is opened; no sequence of its own is
        for row in rows:
            assert isinstance(row.sequence, SlotSequence)
            row.state = _Shared(row.sequence)

    def prospects(self, row: DraftRow) -> list[Prospect]:
        row.state.truncate(row.sequence.length)
        return [replace(prospect, first=PRIOR, later=PRIOR) for prospect in super().prospects(row)]

    def observe(self, rows: Many[DraftRow]) -> None:
        for row in rows:
            row.state.truncate(row.sequence.length)

    def end(self, row: DraftRow) -> None:
        """The slot is the target's."""


class _Shared(SlotSequence):
    """The target's sequence, and drafted tokens after it that only the first layers hold."""

    def __init__(self, base: SlotSequence) -> None:
        self._base = base
        self._length = base.length

    @property
    def slot(self) -> int:  # type: ignore[override]
        return self._base.slot

    @property
    def base(self) -> SlotSequence:
        return self._base

    def truncate(self, length: int) -> None:
        self._length = length

    def close(self) -> None:
        raise ParameterError("a shared sequence is closed by its owner")


class _FirstLayers(TransformersModel):
    """A view of the target that shares its weights, its cache and its slots."""

    looks_again = False  # what it proposes is tested in any case
    _made_of: list[nn.Module]
    _made_beside: RecordedPasses | CapturedPasses | None

    def is_still_of(self, target: TransformersModel) -> bool:
        """Whether the target has the parts, the cache and the recorded passes that it had."""
        now = list(target.module.modules())
        same = len(now) == len(self._made_of) and all(a is b for a, b in zip(now, self._made_of, strict=True))
        same = same and self._cache is target._cache and self._open is target._open and self._made_beside is target.recorded
        return same and (self.recorded is None or self.recorded.fits())

    def _is_open(self, sequence: Sequence) -> bool:
        return super()._is_open(sequence.base if isinstance(sequence, _Shared) else sequence)

    def _kept_states(self) -> dict[int, StateLayer]:
        """None: the states that heads read are the target's own, left by its passes over all layers."""
        return {}


# While the target lives, for whoever generates from many prompts, one call each: to make a view takes as long as two passes.
_kept: WeakKeyDictionary[TransformersModel, dict[int, _FirstLayers]] = WeakKeyDictionary()


def first_layers(target: TransformersModel, layers: int) -> TransformersModel:
    """The target cut after its first layers: the same modules, nothing copied; what it was before if it still is that."""
    kept = _kept.setdefault(target, {})
    view = kept.get(layers)
    if view is None or not view.is_still_of(target):
        view = kept[layers] = _view_of(target, layers)
    return view


def _view_of(target: TransformersModel, layers: int) -> _FirstLayers:
    view = _FirstLayers.__new__(_FirstLayers)
    view.__dict__.update(target.__dict__)
    view.module = _cut(target.module, int(target.module.config.get_text_config().num_hidden_layers), layers)
    view._name = f"{target.name}[:{layers}]"
    view._width = _as_it_is
    view._made_of, view._made_beside = list(target.module.modules()), target.recorded
    view.compiled = view.recorded = None  # the passes of all layers
    if target.recorded is not None:
        view.record()
    return view


def _cut(module: Any, total: int, layers: int) -> Any:
    """A shallow copy of a module in which the list of `total` layers is shorter."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    for name, child in module._modules.items():
        if isinstance(child, nn.ModuleList) and len(child) == total:
            twin._modules[name] = nn.ModuleList(list(child)[:layers])
            if hasattr(twin, "config"):
                twin.config = copy.deepcopy(module.config)
                twin.config.num_hidden_layers = layers
                if getattr(twin.config, "layer_types", None):
                    twin.config.layer_types = list(twin.config.layer_types)[:layers]
            return twin
    for name, child in module._modules.items():
        if child is not None and (cut := _cut(child, total, layers)) is not None:
            twin._modules[name] = cut
            if hasattr(twin, "config"):
                twin.config = cut.config
            return twin
    return None
