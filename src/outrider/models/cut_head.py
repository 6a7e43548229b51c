"""A draft model whose head has the rows of some tokens only, so that a drafted token costs less.

The head of a small model over a large vocabulary is most of what a pass reads: 136 of 494 million weights of Qwen2.5-0.5B. A
draft need not be able to propose everything: its law is then one over fewer tokens, the others have probability 0, and the
ratio rule is exact for any law of the draft (Leviathan A.1). It reads all tokens as before.

Which rows: the lowest ids, where a number is asked for. Byte-pair tokenizers number their tokens by the order of merging,
which is that of frequency. A student that `outrider train` made knows its own: its configuration lists them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelError, ParameterError

DRAFT_TOKENS = "draft_tokens"


def check_num_tokens(num_tokens: int, vocab_size: int) -> None:
    """Raise `ParameterError` unless a vocabulary can be cut to that many."""
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or not 1 <= num_tokens <= vocab_size:
        raise ParameterError(f"num_tokens must be a whole number in 1 … {vocab_size}, got {num_tokens!r}")


def cut_name(name: str, num_tokens: int | None) -> str:
    """What a cut model is called, as a draft's options are written."""
    return name if num_tokens is None else f"{name}:num_tokens={num_tokens}"


def draft_tokens(config: Any, name: str) -> Tensor | None:
    """Those that a model's configuration lists; None if it lists none. → int64 [T], ascending"""
    listed = getattr(config, DRAFT_TOKENS, None)
    if listed is None:
        return None
    size = int(config.get_text_config().vocab_size)
    numbers = isinstance(listed, list) and all(type(token) is int and 0 <= token < size for token in listed)
    if not numbers or not listed or any(after <= before for before, after in pairwise(listed)):
        raise ModelError(f"{DRAFT_TOKENS} in the config.json of {name} must be token ids in 0 … {size - 1}, ascending")
    return torch.tensor(listed)


def tokens_of_rows(module: Any, name: str) -> Tensor | None:
    """What the rows of a head stand for, if it was cut; None if it has one for every token. → int64 [T], ascending"""
    listed = draft_tokens(module.config, name)
    rows = getattr(module.get_output_embeddings(), "out_features", None)
    if rows is None or rows >= int(module.config.get_text_config().vocab_size):
        return None
    return listed if listed is not None and rows == len(listed) else torch.arange(rows)


def spread(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Logits of `tokens` in their places, -inf elsewhere. [.., T] → [.., V]"""
    out = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return out.index_copy_(-1, tokens, logits)


@torch.no_grad()
def cut_head(module: Any, rows: int | Tensor, name: str) -> None:
    """Leave some rows of a transformers model's head, the first ones or those of given tokens, in place; its embeddings stay
    whole.
    """
    if isinstance(rows, int):
        check_num_tokens(rows, int(module.config.get_text_config().vocab_size))
        rows = torch.arange(rows)
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(f"the head of {name} can't be cut: it is no linear layer; leave num_tokens out")
    weight = head.weight[rows]
    cut = nn.Linear(weight.shape[1], len(rows), bias=head.bias is not None, dtype=weight.dtype, device="meta")
    cut.weight = nn.Parameter(weight, requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias[rows], requires_grad=False)
    module.set_output_embeddings(cut)
