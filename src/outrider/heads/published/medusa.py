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
from outrider.heads.published.checkpoint import UNKNOWN, weight_of

BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
HEAD = re.compile(r"(?:lm_heads\.(\d+)|(\d+)\.\d+)\.weight")


def is_medusa(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> bool:
    """Whether it is one."""
    return "medusa_num_heads" in about or any(name.startswith(("0.0.", "lm_heads.", "blocks.")) for name in weights)


def read_medusa(about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> StoredHead:
    """about: its `config.json`. All heads of the file are read: configs have named fewer. Raises `ValueError`."""
    linear, heads = _sorted_out(weights)
    if not linear:
        raise ValueError("it has no residual blocks")
    blocks, depth = 1 + max(i for i, _ in linear), 1 + max(j for _, j in linear)
    shared = bool(about.get("original_lm_head"))  # all heads have the target's own output layer
    if not shared and set(heads) != set(range(blocks)):
        raise ValueError(f"it has {blocks} heads, and output layers of {len(heads)}")
    width = weight_of(linear[0, 0], "weight", 2).shape[1]
    named: dict[str, Tensor] = {}
    for i in range(blocks):
        for j in range(depth):
            if "weight" not in linear.get((i, j), {}):
                raise ValueError(f"its head {i} has no residual block {j}")
            named[f"blocks.{i}.{j}.weight"] = weight = linear[i, j]["weight"]
            named[f"blocks.{i}.{j}.bias"] = linear[i, j].get("bias", torch.zeros(width, dtype=weight.dtype))
    size = int(about.get("vocab_size") or 0)
    if shared:
        if not size:
            raise ValueError("its config says no vocab_size, and its output layer is its target's")
        rows, tokens = dict[str, Tensor](), torch.arange(size)
    else:
        rows, tokens = _rows([heads[i] for i in range(blocks)], weights.get("token_map"))
    shape = HeadConfig(
        kind="blockwise",
        target=str(about.get("base_model_name_or_path") or UNKNOWN),
        width=width,
        vocab_size=size or len(heads[0]),
        num_tokens=len(tokens),
        intermediate_size=width,
        blocks=blocks,
        published=Published("Medusa", width, depth=depth),
    )
    return StoredHead(shape, tokens, named, rows)


def _sorted_out(weights: Mapping[str, Tensor]) -> tuple[dict[tuple[int, int], dict[str, Tensor]], dict[int, Tensor]]:
    """Residual blocks by head and depth, output layers by head."""
    linear: dict[tuple[int, int], dict[str, Tensor]] = {}
    heads: dict[int, Tensor] = {}
    for name, value in weights.items():
        if name in ("token_map", "lm_head.weight"):
            continue
        if found := BLOCK.fullmatch(name):
            head, depth = (found[1], found[2]) if found[1] else (found[3], found[4])
            linear.setdefault((int(head), int(depth)), {})[found[5]] = value
        elif found := HEAD.fullmatch(name):
            heads[int(found[1] or found[2])] = value
        else:
            raise ValueError(f"it has an unknown weight {name!r}")
    return linear, heads


def _rows(heads: list[Tensor], token_map: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """The output layers, and the target's ids of their rows, ascending."""
    if any(head.shape != heads[0].shape for head in heads):
        raise ValueError("its output layers differ in size")
    tokens = torch.arange(len(heads[0])) if token_map is None else token_map.long()
    if token_map is not None:
        if len(tokens) > len(heads[0]):
            raise ValueError(f"its token_map has {len(tokens)} tokens, and its output layers {len(heads[0])} rows")
        if len(tokens) < len(heads[0]):  # rows of all tokens, of which the map names those that count
            if int(tokens.min()) < 0 or int(tokens.max()) >= len(heads[0]):
                raise ValueError("its token_map names tokens that its output layers don't have")
            heads = [head[tokens] for head in heads]
        tokens, order = tokens.sort()
        heads = [head[order] for head in heads]
    return {f"heads.{i}": head for i, head in enumerate(heads)}, tokens
