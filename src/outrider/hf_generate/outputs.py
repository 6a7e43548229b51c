"""What `generate` returns: padded rows, and the output object with scores and logits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.forced import logits_along
from outrider.models.base import Source, has_encoder
from outrider.models.transformers_model import TransformersModel
from outrider.sampling.penalties import apply_processors


def padded_sequences(new: Sequence[Sequence[int]], input_ids: Tensor, pad: int) -> Tensor:
    """The new tokens of each row behind its prompt, filled up to the longest. → int64 [B, T]"""
    width = max(map(len, new))
    tail = torch.tensor([[*row, *[pad] * (width - len(row))] for row in new], dtype=torch.long)
    return torch.cat([input_ids, tail.to(input_ids.device)], dim=1)


def warn_of_context(target: TransformersModel) -> None:
    """`generate` writes on behind a model's last position, or ends in an error there."""
    warnings.warn(f"a text ended with the context of {target.name}, {target.max_length} tokens", stacklevel=2)


def output(target: TransformersModel, sequences: Tensor, further: Mapping[str, Any], beams: bool = False) -> Any:
    """The output object of transformers for this kind of model and search."""
    from transformers.generation import utils

    name = f"Generate{'Beam' if beams else ''}{'EncoderDecoder' if has_encoder(target) else 'DecoderOnly'}Output"
    return getattr(utils, name)(sequences=sequences, **further)


def wanted_scores(config: Any) -> list[str]:
    """Of `scores` and `logits`, what the call asks for."""
    asked = [name for name in ("scores", "logits") if getattr(config, f"output_{name}", None)]
    return asked if config.return_dict_in_generate else []


def scores_along(
    target: TransformersModel,
    rows: Sequence[tuple[list[int], int]],
    sources: Sequence[Source | None],
    processors: Sequence[Any],
    config: Any,
) -> dict[str, tuple[Tensor, ...]]:
    """`scores` and `logits`, if the call wants them: a tensor [B, V] a step, from one more pass along each text.

    rows: tokens, and how many of them are the prompt's. Where a row has ended, its padding is certain.
    """
    wanted = wanted_scores(config)
    if not wanted:
        return {}
    width = max(len(tokens) - start for tokens, start in rows)
    found: dict[str, tuple[Tensor, ...]] = {}
    steps = {name: torch.full((width, len(rows), target.vocab_size), -torch.inf, device=target.device) for name in wanted}
    for tensor in steps.values():
        tensor[:, :, padding(config)] = 0.0
    for i, ((tokens, start), source) in enumerate(zip(rows, sources, strict=True)):
        if len(tokens) == start:
            continue
        logits = torch.cat([chunk.float() for chunk in logits_along(target, tokens, start, source)])
        if "logits" in steps:
            steps["logits"][: len(logits), i] = logits
        if "scores" in steps:
            ids = torch.tensor(tokens, device=target.device)
            for n in range(len(logits)):
                steps["scores"][n, i] = apply_processors(logits[n], ids[: start + n], start, processors)
    for name, tensor in steps.items():
        found[name] = tuple(tensor.unbind(0))
    return found


def padding(config: Any, beams: bool = False) -> int:
    """What `generate` fills up with: its padding token, or for want of one the first end; with beams the end also for 0."""
    pad, ends = config._pad_token_tensor, config._eos_token_tensor
    token = 0 if pad is None else int(pad)
    if not beams:
        return token
    return -1 if ends is None else token or int(ends[0])
