"""Positions row by row in decoders that derive them from the length of the cache, one number for the whole batch.

Two ways of knowing where a token stands do that: tables of positions added to the embeddings (BART, Marian, Whisper, …), and
T5's bias of the attention by the distance between query and key. For the time of one pass, both are told the positions that
each row really has. Both give a row what the model's own code would have given it alone: the same entries of the tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError


def position_modules(decoder: nn.Module, name: str) -> tuple[list[Any], list[Any]]:
    """The decoder's tables of positions, and its attentions with a bias. Raises `ModelError` for tables read otherwise."""
    tables = [child for key, child in decoder.named_children() if key == "embed_positions"]
    for table in tables:
        if "position_ids" not in inspect.signature(table.forward).parameters:
            raise ModelError(
                f"{name} can't be used: its decoder reads positions from the tokens ({type(table).__name__}), "
                "which rows of different length do not allow"
            )
    biased = [module for module in decoder.modules() if getattr(module, "has_relative_attention_bias", False)]
    return tables, biased


@contextmanager
def at_positions(tables: list[Any], biased: list[Any], positions: Tensor, length: int) -> Iterator[None]:
    """Let the modules see int64 [R, N] positions, and keys at 0 … length - 1, until the block ends."""
    replaced = [(table, "forward", _table_at(table.forward, positions)) for table in tables]
    replaced += [(module, "compute_bias", _bias_at(module.compute_bias, positions, length)) for module in biased]
    for module, method, replacement in replaced:
        setattr(module, method, replacement)
    try:
        yield
    finally:
        for module, method, _ in replaced:
            module.__dict__.pop(method)


def _table_at(read: Callable[..., Tensor], positions: Tensor) -> Callable[..., Tensor]:
    def forward(first: Any, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG001 - the positions that it guessed
        return read(first, 0, position_ids=positions.reshape(-1)).reshape(*positions.shape, -1)

    return forward


def _bias_at(compute: Callable[..., Tensor], positions: Tensor, length: int) -> Callable[..., Tensor]:
    """The bias depends on the distance only, so the last position's row of it holds all that can occur. → [R, heads, N, L]

    Keys after a query, which it may not see, get some value.
    """

    def compute_bias(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG001 - one position for all rows
        by_key = compute(1, length, device=positions.device, past_seen_tokens=length - 1)[0, :, 0]
        keys = torch.arange(length, device=positions.device)
        at = (length - 1 - positions.unsqueeze(-1) + keys).clamp(max=length - 1)
        return by_key[:, at].transpose(0, 1)

    return compute_bias
