"""A short check at opening that a model gives the same logits through the slot cache as in a plain forward pass.

transformers has hundreds of architectures. Those known not to roll back are refused by their config (`rollback`, `masks`);
this catches the rest: models that derive positions from padding, keep further state, or read masks in their own way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.errors import ModelError, in_one_line
from outrider.models.base import Source, open_sequence
from outrider.support.device_data import pad_rows

if TYPE_CHECKING:
    from outrider.models.transformers_model import TransformersModel

# Root mean square of the difference allowed, relative to the spread of the logits. Reordered sums alone were seen to give
# 0.04 in bfloat16 (SmolLM2-135M) and 1e-5 in float32; wrong positions give 0.3 and more.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
SMALL = 50  # tokens of any vocabulary that is not smaller


def tolerance(dtype: torch.dtype) -> float:
    """How much of the logits' spread two ways to compute them may differ by, in root mean square."""
    return _TOLERANCE.get(dtype, 0.15)


def allowed(model: TransformersModel) -> float:
    """`tolerance` for passes of a model.

    Recurrent layers compute in float32 whatever their weights are, ours where they compute in bfloat16 (24 layers of Mamba 2
    with random weights differ by 0.13 there), and a last bit of theirs may become a step of an activation in 8 bits (24
    layers of Qwen 3.5's with random weights: 0.07). Wrong states were seen to differ by 0.36 and more.
    """
    usual = tolerance(model.dtype)
    return max(2 * usual, 0.2 if model.quantized else 5e-3) if model.keeps_states else usual


def off_by(found: Tensor, wanted: Tensor) -> float:
    """The root mean square of their difference over the spread of `wanted`, [N, V] each; NaN if that knows of no token."""
    rows = ~wanted[0].isneginf()  # a head that was cut has none for the others
    wanted, found = wanted[:, rows].double(), found[:, rows].double()
    return float((found - wanted).square().mean().sqrt() / wanted.std().clamp(min=1e-30)) if wanted.numel() else math.nan


def probe(model: TransformersModel) -> None:
    """Raise `ModelError` if rows of different length, a roll-back, or a later position change the logits."""
    tokens = _tokens(model, 8)
    try:
        with torch.inference_mode():
            plain = plain_logits(model, tokens)
        cached = _through_cache(model, tokens)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        reason = in_one_line(error, 160)
        raise ModelError(f"{model.name} can't be used: it does not run with the slot cache ({reason})") from error
    off = off_by(cached, model.over_vocabulary(plain)[0, 4:])
    if not off <= allowed(model):
        raise ModelError(
            f"{model.name} ({model.module.config.model_type}) can't be used: it gives other logits through the slot cache "
            f"than without a cache (off by {off:.2g} of their spread), so it can't be rolled back safely"
        )


def reads_alternatives(model: TransformersModel) -> bool:
    """Whether tokens in the places of others get the logits that they would have there, and leave them to what follows.

    A model may derive positions in its own way, or read masks otherwise than they say.
    """
    limit, tokens = min(model.vocab_size, SMALL), _tokens(model, 6)
    other, after = (tokens[4] + 1) % limit, (tokens[5] + 2) % limit
    try:
        with torch.inference_mode():
            plain = model.over_vocabulary(plain_logits(model, [*tokens[:4], other, after]))[0, 4:].double()
        found = _beside(model, tokens, other, after).double()
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError):
        return False
    return off_by(found, plain) <= tolerance(model.dtype)


def _tokens(model: Any, count: int) -> list[int]:
    """Some, as different as the vocabulary allows."""
    limit = min(model.vocab_size, SMALL)
    step = next(step for step in (7, 5, 3) if limit % step)
    return [(step * i + 3) % limit for i in range(count)]


def _beside(model: TransformersModel, tokens: list[int], other: int, after: int) -> Tensor:
    """Logits after `other` in the place of tokens[4], and after the token that follows it once it was taken. [2, V]"""
    longer, ours = model.open(), model.open()
    try:
        model.score([longer, ours], *pad_rows([tokens, tokens[:3]], model.device), "none")
        new, lengths = pad_rows([tokens[:2], tokens[3:6]], model.device)
        others = torch.tensor([tokens[1:3], [tokens[0], other]], device=model.device)
        first = model.score_beside([longer, ours], new, lengths, others, [[0], [0, 1]])[1, lengths[1] + 1]
        model.take_alternative(ours, 4, 1)
        second = model.score([ours], *pad_rows([[after]], model.device), "all")
        assert second is not None
        return torch.stack([first, second[0, 0]])
    finally:
        longer.close()
        ours.close()


def plain_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits of a pass without a cache. [1, T, V]"""
    ids = torch.tensor([tokens], device=model.device)
    if not model.has_encoder:
        out: Tensor = model.module(input_ids=ids, use_cache=False).logits
        return out
    source = _sources(model)[1]
    if isinstance(source, Tensor):
        inputs = {"input_features": source.unsqueeze(0).to(model.device, model.dtype)}
    else:
        inputs = {"input_ids": torch.tensor([list(source)], device=model.device)}
    seen: Tensor = model.module(**inputs, decoder_input_ids=ids, use_cache=False).logits
    return seen


def _sources(model: Any) -> tuple[Source, Source]:
    """Two sources: features as they are, tokens of different number."""
    whole: Source = model.stand_in()
    if isinstance(whole, Tensor):
        return whole, torch.linspace(-1, 1, whole.numel()).sin().reshape(whole.shape)
    return whole[:9], whole[2:7]


def _through_cache(model: TransformersModel, tokens: list[int]) -> Tensor:
    """Logits of tokens[4:], scored beside a longer row and after a pass that was right in part. [4, V]"""
    theirs, mine = _sources(model) if model.has_encoder else (None, None)
    longer, ours = open_sequence(model, theirs), open_sequence(model, mine)
    try:
        model.score([longer, ours], *pad_rows([tokens[:6], tokens[:2]], model.device), "none")
        model.score([longer, ours], *pad_rows([tokens[6:7], [tokens[2], *tokens[5:7]]], model.device), "none")
        ours.truncate(3)
        model.score([ours], *pad_rows([tokens[3:4]], model.device), "none")
        out = model.score([longer, ours], *pad_rows([tokens[7:8], tokens[4:]], model.device), "all")
        assert out is not None
        return out[1]
    finally:
        longer.close()
        ours.close()
