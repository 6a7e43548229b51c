"""Medusa checkpoints → a head's shape and weights by the names of `published.networks`.

Their own repository's format (`medusa_lm_head.pt`: a number for each head, residual blocks, then its output layer), and
vLLM's (`blocks` and `lm_heads`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.heads.config import HeadConfig, Published, StoredHead

BLOCK = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias)")
HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def read_medusa(name: str, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> StoredHead:
    """name: of its target, as far as it is known. about: its `config.json`. Raises `ValueError` or `KeyError`."""
    linear: dict[tuple[int, int], dict[str, Tensor]] = {}
    heads: dict[int, Tensor] = {}
    for key, value in weights.items():
        if key in ("token_map", "lm_head.weight"):
            continue
        if found := HEAD.fullmatch(key):
            heads[int(found[1])] = value
        elif found := BLOCK.fullmatch(key):
            linear.setdefault((int(found[1]), int(found[2])), {})[found[3]] = value
        else:
            raise ValueError(f"it has an unknown weight {key!r}")
    if not heads:  # the last of a head's layers is its output layer
        for block in {first for first, _ in linear}:
            last = max(second for first, second in linear if first == block)
            heads[block] = linear.pop((block, last))["weight"]
    said = int(about.get("medusa_num_heads") or about.get("num_heads") or len(heads))
    blocks = min(said, len(heads))  # checkpoints have had more heads than their config uses
    shared = weights.get("lm_head.weight")
    rows = [heads[i] if shared is None or i in heads else shared for i in range(blocks)]
    if not rows or any(row.shape != rows[0].shape for row in rows):
        raise ValueError("its heads have no output layers of one size")
    width = rows[0].shape[1]
    depth = 1 + max((second for first, second in linear if first < blocks), default=-1)
    named = {}
    for i in range(blocks):
        for j in range(depth):
            parts = linear[i, j]
            named[f"blocks.{i}.{j}.weight"] = parts["weight"]
            named[f"blocks.{i}.{j}.bias"] = parts.get("bias", torch.zeros(width, dtype=parts["weight"].dtype))
    tokens = weights.get("token_map", torch.arange(len(rows[0]))).long()
    if len(tokens) < len(rows[0]):
        rows = [row[tokens] for row in rows]
    tokens, order = tokens.sort()
    if not torch.equal(order, torch.arange(len(order))):
        rows = [row[order] for row in rows]
    shape = HeadConfig(
        kind="blockwise",
        target=name,
        width=width,
        vocab_size=int(about.get("vocab_size") or len(rows[0])),
        num_tokens=len(tokens),
        intermediate_size=width,
        blocks=blocks,
        published=Published("Medusa", width, depth=depth),
    )
    return StoredHead(shape, tokens, named, {f"heads.{i}": row for i, row in enumerate(rows)})
