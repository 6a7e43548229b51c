"""What a target's own configuration says about its law: of an encoder–decoder it belongs to it, of others it is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from outrider.errors import ParameterError
from outrider.models.base import LanguageModel, has_encoder
from outrider.sampling import SamplingSettings

_log = logging.getLogger(__name__)


def law_along(target: LanguageModel, sampling: SamplingSettings, prefix: Sequence[int]) -> SamplingSettings:
    """The settings along texts whose end nothing forces. prefix: what a decoder of an encoder begins with."""
    return with_own_rules(target, sampling, [prefix])


_UNUSED = {  # names of a generation config → what changes nothing
    "repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "guidance_scale": (None, 1.0),
}
_told: WeakSet[Any] = WeakSet()


def tell_unused_rules(target: LanguageModel, sampling: SamplingSettings) -> None:
    """Say once, of a decoder-only model, which rules of its generation config are the caller's to give.

    transformers' `generate` applies them unasked, so that its greedy text would be another.
    """
    config = getattr(getattr(target, "module", None), "generation_config", None)
    if config is None or target in _told:
        return
    _told.add(target)
    asked = {name: getattr(config, name, None) for name in _UNUSED}
    unused = {name: value for name, value in asked.items() if value not in _UNUSED[name]}
    if sampling.repetition_penalty != 1.0:
        unused.pop("repetition_penalty", None)
    if unused:
        said = ", ".join(f"{name} {value!r:.40}" for name, value in unused.items())
        _log.warning(
            "the generation config of %s has rules that are not applied (%s): give repetition_penalty, or transformers' "
            "logits processors as processors, to have the distribution of its generate",
            target.name,
            said,
        )


def forces_end(target: LanguageModel) -> bool:
    """Whether a text that has become as long as it may is made to end, by an encoder–decoder's generation config."""
    if not has_encoder(target):
        return False
    from outrider.models import decoder_rules
    from outrider.models.encoder_decoder import EncoderDecoderModel

    assert isinstance(target, EncoderDecoderModel)
    return decoder_rules.forces_end(target.module.generation_config)


def with_own_rules(
    target: LanguageModel, sampling: SamplingSettings, prefixes: Sequence[Sequence[int]], max_new_tokens: int | None = None
) -> SamplingSettings:
    """The settings and, for an encoder-decoder, what its generation config forbids and forces, before the caller's own.

    prefixes: what the decoder begins with, in each row. max_new_tokens: None if no end is to be forced.
    """
    if not has_encoder(target):
        tell_unused_rules(target, sampling)
        return sampling
    from outrider.models.decoder_rules import decoder_rules
    from outrider.models.encoder_decoder import EncoderDecoderModel

    assert isinstance(target, EncoderDecoderModel)
    lengths = {len(prefix) for prefix in prefixes}
    if len(lengths) > 1:
        raise ParameterError(f"prompts of one batch must begin alike, got {sorted(lengths)} tokens for the decoder")
    own = decoder_rules(target, lengths.pop(), max_new_tokens)
    bias = {**sampling.logit_bias, **own.bias}
    return replace(sampling, logit_bias=bias, processors=(*own.processors, *sampling.processors))
