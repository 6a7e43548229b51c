"""A draft model whose head has the rows of its most frequent tokens only, so that a drafted token costs less.

The head of a small model over a large vocabulary is most of what a pass reads: 136 of 494 million weights of Qwen2.5-0.5B. A
draft need not be able to propose everything: its law is then one over fewer tokens, the others have probability 0, and the
ratio rule is exact for any law of the draft (Leviathan A.1). It reads all tokens as before.

Which rows: the lowest ids. Byte-pair tokenizers number their tokens by the order of merging, which is that of frequency.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.errors import ModelError, ParameterError


def check_num_tokens(num_tokens: int, vocab_size: int) -> None:
    """Raise `ParameterError` unless a vocabulary can be cut to that many."""
    if not 1 <= num_tokens <= vocab_size:
        raise ParameterError(f"num_tokens must be in 1 … {vocab_size}, got {num_tokens}")


def cut_name(name: str, num_tokens: int | None) -> str:
    """What a cut model is called, as a draft's options are written."""
    return name if num_tokens is None else f"{name}:num_tokens={num_tokens}"


@torch.no_grad()
def cut_head(module: Any, num_tokens: int, name: str) -> None:
    """Leave the first `num_tokens` rows of a transformers model's head, in place; its embeddings stay whole."""
    check_num_tokens(num_tokens, int(module.config.get_text_config().vocab_size))
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(f"the head of {name} can't be cut: it is no linear layer; leave num_tokens out")
    weight = head.weight[:num_tokens]
    cut = nn.Linear(weight.shape[1], num_tokens, bias=head.bias is not None, dtype=weight.dtype, device="meta")
    cut.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias[:num_tokens].clone(), requires_grad=False)
    module.set_output_embeddings(cut)
