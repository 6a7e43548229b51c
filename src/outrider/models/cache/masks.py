"""Attention masks for the slot cache: what each query position of each row may see, by absolute position.

Position k is visible to the query at position q if k <= q and, in a layer with a sliding window w, k > q - w. Nothing else
is needed: other rows live in other slots, and everything past a row's end has k > q. A token that stands in another one's
place (`base.ScoresAlternatives`) lies in a column behind those: it sees what is before its place, and itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError

# Model types whose every layer has the config's sliding window; others name their layers' types, or heed no window.
WINDOWED = ("ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "phimoe", "qwen3_moe", "starcoder2")


# Types of layers that keep a state (`recurrent_cache`), and what attention they have beside it.
RECURRENT = {"linear_attention": None, "conv": None, "hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
WITHOUT_CACHE = ("moe", "mlp")


@dataclass(frozen=True)
class AttentionPattern:
    """The windows of a model's layers: {layer type: window or None}. by_type: the model wants one mask a type.

    recurrent: its types of layers that read no mask.
    """

    windows: dict[str, int | None]
    by_type: bool
    recurrent: tuple[str, ...] = ()

    @property
    def narrowest(self) -> int | None:
        """The window of the layer that sees least, in tokens; None where all see everything."""
        return min((window for window in self.windows.values() if window is not None), default=None)


def attention_pattern(config: Any, name: str) -> AttentionPattern:
    """Read the pattern from a transformers config; refuse layers with neither a key and value per position nor a state."""
    window = getattr(config, "sliding_window", None)
    kind = config.model_type
    named = layer_types(config)
    recurrent = tuple(type_ for type_ in named if type_ in RECURRENT and RECURRENT[type_] is None)
    types = list(dict.fromkeys(beside for type_ in named if (beside := RECURRENT.get(type_, type_)) is not None))
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise ModelError(
            f"{name} ({config.model_type}) can't be used: its {unknown[0]} layers can't be rolled back, and speculation "
            "discards rejected tokens; use another model (Llama, Qwen, LFM 2, …)"
        )
    if not named and window is not None and kind not in WINDOWED:
        raise ModelError(
            f"{name} ({kind}) can't be used: its config has sliding_window={window}, which {kind} may not heed; "
            "set it to null in config.json if it does not"
        )
    if not named:
        return AttentionPattern({"full_attention": window}, by_type=False)
    return AttentionPattern({kind: known[kind] for kind in types}, by_type=len(types) > 1, recurrent=recurrent)


def layer_types(config: Any) -> list[str]:
    """The types of layers with a memory that a config names, each once; none where all are alike."""
    named = dict.fromkeys(getattr(config, "layer_types", None) or ())
    return [type_ for type_ in named if type_ not in WITHOUT_CACHE]


def has_recurrent_layers(config: Any) -> bool:
    """Whether some of a model's layers keep a state."""
    return any(type_ in RECURRENT for type_ in layer_types(config))


def make_mask(
    positions: Tensor, length: int, pattern: AttentionPattern, additive: torch.dtype | None = None, at: Tensor | None = None
) -> Any:
    """The `attention_mask` argument of a forward pass: [R, 1, N, length], or a dict of those by layer type; None where no
    layer reads one.

    positions: int64 [R, N]. additive: the dtype of 0 / -large masks, for models without scaled-dot-product attention;
    boolean otherwise. at: int64 [R, N], the columns of these tokens where they need not be their positions.
    """
    keys = torch.arange(length, device=positions.device)
    masks = {kind: _mask(positions, keys, window, additive, at) for kind, window in pattern.windows.items()}
    return masks | dict.fromkeys(pattern.recurrent) if pattern.by_type else next(iter(masks.values()), None)


def _mask(positions: Tensor, keys: Tensor, window: int | None, additive: torch.dtype | None, at: Tensor | None) -> Tensor:
    queries = positions[:, None, :, None]
    visible = keys <= queries if at is None else keys < queries
    if window is not None:
        visible = visible & (keys > queries - window)
    if at is not None:
        visible = visible | (keys == at[:, None, :, None])
    if additive is None:
        return visible
    return torch.zeros(visible.shape, dtype=additive, device=keys.device).masked_fill_(~visible, torch.finfo(additive).min)
