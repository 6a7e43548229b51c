"""What a model's configuration says about how far it can go, and where it ends."""

from __future__ import annotations

from typing import Any


def end_tokens_of(module: Any) -> frozenset[int]:
    """The end-of-sequence tokens in a transformers model's generation config."""
    listed = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    return frozenset([] if listed is None else [listed] if isinstance(listed, int) else listed)


def context_limit(config: Any) -> int | None:
    """Positions the model has; with longrope, those before its frequencies change.

    transformers picks the short or the long frequencies by the greatest position of the whole pass, so that a longer
    neighbour or a draft would change what a row gets.
    """
    switch = _longrope_switch(config)
    if switch is not None:
        return switch
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _longrope_switch(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    lengths = [
        kind.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for kind in kinds
        if "longrope" in (kind.get("rope_type"), kind.get("type"))
    ]
    return min((int(length) for length in lengths if length), default=None)
