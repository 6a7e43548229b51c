"""Models of any size and random weights that say a known token after each: a target, and drafts that agree by chance.

All the work of a pass is done, with weights drawn at random. But the layers add next to nothing to what the embeddings say,
and the head's row of a token is the embedding of the one before it in a fixed cycle through the vocabulary; so the target's
law is a point mass to rounding, at any temperature, and a draft whose cycle differs at a share 1 - alpha of the tokens is
accepted with probability alpha, independently at each place (Leviathan et al. 2022, section 3.1: betas i.i.d.).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 151_936
SHAPES = {  # Qwen2.5's: width, layers, inner width, heads, heads of keys and values
    "tiny": (128, 2, 256, 4, 2),  # to try the recipe without a GPU
    "0.5B": (896, 24, 4864, 14, 2),
    "1.5B": (1536, 28, 8960, 12, 2),
    "7B": (3584, 28, 18944, 28, 4),
}
SAYS = 40.0  # the logit of the token that is said; all others are normal with a deviation of SAYS / sqrt(width)
QUIET = 1e-5  # of what layers add


def cycle(vocabulary: int, seed: int = 0) -> Tensor:
    """What follows each token: one cycle through all of them. int64 [V]"""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    follows = torch.empty_like(order)
    follows[order] = order.roll(-1)
    return follows


def agreeing(follows: Tensor, alpha: float, seed: int = 1) -> Tensor:
    """Another cycle's token where a coin says so: the same as `follows` at a share `alpha` of the tokens. int64 [V]"""
    draws = torch.rand(len(follows), generator=torch.Generator().manual_seed(seed))
    other = follows[cycle(len(follows), seed + 1)]
    return torch.where(draws < alpha, follows, other)


def say(model: Any, follows: Tensor) -> None:
    """Have a model say `follows[v]` after v. The head's memory stays, so captured passes do, too."""
    table = model.get_input_embeddings().weight.data
    head = model.get_output_embeddings().weight.data
    head.zero_()  # what several tokens lead to has the sum of their embeddings
    head.index_add_(0, follows.to(head.device), table * (SAYS / table.shape[1]))


def successor(shape: tuple[int, int, int, int, int], vocabulary: int, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A Qwen2 model of that shape whose weights are random; `say` has it say something."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    width, layers, inner, heads, kv_heads = shape
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rotary = type(model.model.rotary_emb)
    model.to_empty(device=device)
    model.model.rotary_emb = rotary(config=config).to(device)  # its buffers are computed, not drawn
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            weight.data.normal_(0.0, 1.0 if "embed" in name else weight.shape[1] ** -0.5, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data.mul_(QUIET)
    return model.eval()
