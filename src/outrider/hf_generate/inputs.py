"""What a call of `generate` gives: its rows without their padding, sources, and what can't be honoured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.models.base import Source
from outrider.models.cache.slot_cache import CACHE_NAMES
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.transformers_model import TransformersModel

_HERE = "with outrider.transformers_generate: leave it out"
_UNSUPPORTED = ("output_attentions", "output_hidden_states")
_KNOWN = (*CACHE_NAMES, "position_ids", "attention_mask", "use_cache", "cache_position", "logits_to_keep")
_KNOWN_WITH_ENCODER = (*_KNOWN, "encoder_outputs", "decoder_attention_mask")
_MODES = ("greedy_search", "sample", "assisted_generation", "beam_search")


@dataclass(frozen=True)
class Inputs:
    """prompts: what each row begins with, without padding; whole: with it. sources: what an encoder reads, None without one.

    states: what `generate` has let the encoder make of each source already, [S, W].
    """

    prompts: list[list[int]]
    whole: list[list[int]]
    sources: list[Source | None]
    states: list[tuple[Source, Tensor]] = field(default_factory=list)

    @property
    def padded(self) -> bool:
        """Whether any row was."""
        return self.prompts != self.whole


def refuse_settings(config: Any, input_ids: Tensor, streamer: Any, synced_gpus: bool) -> None:
    """Raise for what the call asks for and can't have."""
    mode = str(config.get_generation_mode().value)
    if mode not in _MODES:
        raise ParameterError(f"{mode} is not available with outrider.transformers_generate: sample, or search with beams")
    asked = [name for name in _UNSUPPORTED if getattr(config, name, None)]
    if asked:
        raise ParameterError(f"{asked[0]} is not available {_HERE}")
    if synced_gpus:
        raise ParameterError(f"synced_gpus is not available {_HERE}")
    if streamer is not None and len(input_ids) > 1:
        raise ParameterError(
            f"streamer must go with one row, got {len(input_ids)} (of prompts, beams, sequences to return): leave it out"
        )


def _holds_tokens(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # it has no layer that counts them
        return bool(cache.has_previous_state())


def refuse_inputs(model: Any, input_ids: Tensor, given: dict[str, Any]) -> None:
    """Raise for inputs of the model that would be ignored; `generate` itself adds some harmless ones."""
    known = _KNOWN_WITH_ENCODER if model.config.is_encoder_decoder else _KNOWN
    unknown = [name for name, value in given.items() if name not in known and not _is_nothing(value)]
    if unknown:
        raise ParameterError(f"{unknown[0]} is not available {_HERE}")
    for name in CACHE_NAMES:
        if given.get(name) is not None and _holds_tokens(given[name]):
            raise ParameterError(f"{name} must be empty {_HERE}")
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if mask is not None and not model.config.is_encoder_decoder:
        others = mask[(mask != 0) & (mask != 1)]  # which transformers sums to positions
        if others.numel():
            raise ParameterError(
                f"attention_mask must be 0 where there is padding and 1 elsewhere, got {others[0].item():g}"
            )
    if positions is not None:
        real = torch.ones_like(input_ids) if mask is None else mask.bool().long()
        # Models that see have several planes of positions, alike for text.
        planes = positions if positions.dim() == 3 else positions.unsqueeze(0)
        own = planes.expand(-1, len(input_ids), -1)[..., -real.shape[1] :]
        if not bool(((own == real.cumsum(-1) - 1) | (real == 0)).all()):
            raise ParameterError(f"position_ids must count the tokens {_HERE}")


def read_inputs(
    target: TransformersModel,
    input_ids: Tensor,
    inputs_tensor: Tensor | None,
    given: dict[str, Any],
    copies: int,
    new_tokens: int,
) -> Inputs:
    """The rows. inputs_tensor: what the encoder reads, each row `copies` times in input_ids. new_tokens: at most."""
    if not isinstance(target, EncoderDecoderModel):
        mask = given.get("attention_mask")
        if mask is not None:
            _check_mask(mask, target.window, input_ids.shape[1] + new_tokens)
        prompts = _without_padding(input_ids, mask)
        return Inputs(prompts, input_ids.tolist(), [None] * len(prompts))
    mask = given.get("decoder_attention_mask")
    if mask is not None and not target.hears and not bool(mask.bool().all()):
        raise ParameterError(f"decoder_attention_mask must be all ones {_HERE}")  # BART counts the padding as positions
    prompts = _without_padding(input_ids, mask)
    assert inputs_tensor is not None
    read = _sources(target, inputs_tensor, given.get("attention_mask"), given.get("encoder_outputs"), copies)
    return Inputs(prompts, input_ids.tolist(), [read[i // copies][0] for i in range(len(prompts))], read)


def _check_mask(mask: Tensor, window: int | None, length: int) -> None:
    """window: as `TransformersModel.window`. length: of the longest text, with its padding."""
    if bool((mask[:, -1] == 0).any()):
        raise ParameterError('attention_mask must not end in padding: pad on the left, padding_side="left"')
    holes = bool((mask.bool().int().diff(dim=1) < 0).any())
    if holes and window is not None and length > window:  # transformers' windows count what is masked, too
        raise ParameterError(
            f"attention_mask must have no holes with a model that sees {window} tokens, fewer than the text may have: leave "
            "those tokens out of input_ids and pad on the left"
        )


def _sources(
    target: EncoderDecoderModel, inputs: Tensor, mask: Tensor | None, outputs: Any, copies: int
) -> list[tuple[Source, Tensor]]:
    """Each source, and the encoder's states of it."""
    states = outputs[0][::copies]
    if target.hears:
        return list(zip(inputs, states, strict=True))
    if inputs.is_floating_point() or inputs.shape[1] != states.shape[1] or bool((inputs < 0).any()):
        raise ParameterError(
            "encoder_outputs can't stand for a source with outrider.transformers_generate, drafts read its tokens: give "
            "input_ids, too"
        )
    kept = torch.ones_like(inputs) if mask is None else mask[::copies]
    found: list[tuple[Source, Tensor]] = []
    for row, state, keep in zip(inputs, states, kept.bool().to(inputs.device), strict=True):
        found.append(([int(token) for token in row[keep].tolist()], state[keep.to(state.device)]))
    first: dict[tuple[int, ...], Tensor] = {}
    for source, state in found:
        before = first.setdefault(tuple(map(int, source)), state)
        if not torch.allclose(before.float(), state.float(), rtol=1e-3, atol=1e-3):
            raise ParameterError("sources of the same tokens must be padded alike in a call: give each once, or one a call")
    return found


def _is_nothing(value: Any) -> bool:
    """`generate` itself adds empty dictionaries."""
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without their padding, on either side."""
    if attention_mask is None:
        return [list(map(int, row)) for row in input_ids.tolist()]
    mask = attention_mask.bool().cpu()
    return [list(map(int, row[keep].tolist())) for row, keep in zip(input_ids.cpu(), mask, strict=True)]
