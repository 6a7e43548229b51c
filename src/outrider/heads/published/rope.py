"""Rotary positions of published heads, as their configs describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATIC = ("default", "linear", "llama3", "yarn")  # whose frequencies are the same in every pass


def read_rope(inner: Mapping[str, Any], usual: int) -> tuple[dict[str, Any], int]:
    """The parameters by the names of transformers 5, theta among them, and how many positions the head is for.

    usual: as many where its config says nothing. Raises `ValueError` for what is not supported.
    """
    found = dict(inner.get("rope_parameters") or inner.get("rope_scaling") or {})
    older = found.pop("type", None)
    found["rope_type"] = found.get("rope_type") or older or "default"
    found["rope_theta"] = found.get("rope_theta") or inner.get("rope_theta") or 10000.0
    if found["rope_type"] not in STATIC:
        raise ValueError(f"its rotary positions are {found['rope_type']}, and only {', '.join(STATIC)} are supported")
    if float(found.get("partial_rotary_factor") or inner.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("it turns a part of each head only, which is not supported")
    longest = int(inner.get("max_position_embeddings") or usual)
    if found["rope_type"] != "default":
        scaled = float(found["factor"]) * float(found.get("original_max_position_embeddings") or longest)
        longest = max(longest, int(scaled))
    return found, longest
