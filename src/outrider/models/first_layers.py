"""A model's first layers with its head, as a model: the same modules, cache and slots, nothing copied (early exit)."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from outrider.errors import ParameterError
from outrider.models.as_opened import AsOpened
from outrider.models.base import Sequence
from outrider.models.cache.slot_cache import StateLayer
from outrider.models.cache.slots import SlotSequence
from outrider.models.passes.captured import CapturedPasses
from outrider.models.passes.recorded import RecordedPasses
from outrider.models.transformers_model import TransformersModel, as_it_is


class SharedSequence(SlotSequence):
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


class FirstLayers(TransformersModel):
    """A view of the target that shares its weights, its cache and its slots."""

    looks_again = False  # what it proposes is tested in any case
    keeps_prefixes = False  # a block is of all layers
    _made_of: list[nn.Module]
    _made_beside: RecordedPasses | CapturedPasses | None

    def look_again(self) -> None:
        """As a model does when a sequence is opened: none of its own is."""
        self._look_again()

    def is_still_of(self, target: TransformersModel) -> bool:
        """Whether the target has the parts, the cache and the recorded passes that it had."""
        now = list(target.module.modules())
        same = len(now) == len(self._made_of) and all(a is b for a, b in zip(now, self._made_of, strict=True))
        same = same and self._cache is target._cache and self._open is target._open and self._made_beside is target.recorded
        return same and (self.recorded is None or self.recorded.fits())

    def _is_open(self, sequence: Sequence) -> bool:
        return super()._is_open(sequence.base if isinstance(sequence, SharedSequence) else sequence)

    def _kept_states(self) -> dict[int, StateLayer]:
        """None: the states that heads read are the target's own, left by its passes over all layers."""
        return {}


# While the target lives, for whoever generates from many prompts, one call each: to make a view takes as long as two passes.
_kept: WeakKeyDictionary[TransformersModel, dict[int, FirstLayers]] = WeakKeyDictionary()


def first_layers(target: TransformersModel, layers: int) -> FirstLayers:
    """The target cut after its first layers: the same modules, nothing copied; what it was before if it still is that."""
    kept = _kept.setdefault(target, {})
    view = kept.get(layers)
    if view is None or not view.is_still_of(target):
        view = kept[layers] = _view_of(target, layers)
    return view


def _view_of(target: TransformersModel, layers: int) -> FirstLayers:
    view = FirstLayers.__new__(FirstLayers)
    view.__dict__.update(target.__dict__)
    view.module = _cut(target.module, int(target.module.config.get_text_config().num_hidden_layers), layers)
    view._name = f"{target.name}[:{layers}]"
    view._width, view.prefix_cache = as_it_is, None
    view._as_opened = AsOpened.of(view.module, view._name)  # of windows of two kinds the first layers may have one
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
            twin._modules[name].training = child.training
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
