"""What an encoder–decoder's generation config fixes: the tokens its decoder begins with, and tokens forbidden or forced.

Without these a released checkpoint does not say what it was made to say, so they belong to the target's law, and greedy
output is that of transformers' `generate` with one beam. What a config says about beams, sampling and lengths (`num_beams`,
`length_penalty`, `do_sample`, `max_length`) is left to the caller's options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError, ParameterError
from outrider.models.base import Source, end_tokens
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.support.device_data import index

Processor = Callable[[Tensor, Tensor], Tensor]
"""Of transformers: tokens [1, n], scores [1, V] → scores."""
_NOT_KEPT = (
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "guidance_scale",
)


def decoder_prefix(
    model: EncoderDecoderModel, source: Source, language: str | None = None, task: str | None = None
) -> list[int]:
    """The tokens that the decoder begins with, before any is chosen.

    The start token and, if the config forces one, the first (BART, mBART, Marian); for Whisper language, task and "no
    timestamps". Without a language a multilingual Whisper hears which it is, in one pass. language: "en", "german", …; task:
    "transcribe" or "translate"; Whisper only.
    """
    config = model.module.generation_config
    start = config.decoder_start_token_id
    if start is None:
        start = getattr(model.module.config, "decoder_start_token_id", None)
    if start is None:
        raise ModelError(f"{model.name} can't be used: its configuration names no decoder_start_token_id")
    if _is_whisper(config):
        return _whisper_prefix(model, source, int(start), language, task)
    if language is not None or task is not None:
        raise ParameterError(f"language and task are for multilingual Whisper models, {model.name} has none: leave them out")
    forced = getattr(config, "forced_bos_token_id", None)
    return [int(start)] if forced is None else [int(start), int(forced)]


def _whisper_prefix(
    model: EncoderDecoderModel, source: Source, start: int, language: str | None, task: str | None
) -> list[int]:
    config = model.module.generation_config
    languages: dict[str, int] = getattr(config, "lang_to_id", None) or {}
    tasks: dict[str, int] = getattr(config, "task_to_id", None) or {}
    if (language is not None and not languages) or (task is not None and not tasks):
        raise ParameterError(f"{model.name} knows one language and task: leave language and task out")
    if task is not None and task not in tasks:
        raise ParameterError(f"task must be {' or '.join(sorted(tasks))}, got {task!r}")
    tokens = [start]
    if languages:
        tokens.append(languages[_language_key(language, languages)] if language else _heard(model, source, start))
    if tasks:
        tokens.append(tasks[task or "transcribe"])
    stamps = getattr(config, "no_timestamps_token_id", None)
    return tokens if stamps is None else [*tokens, int(stamps)]


def _language_key(language: str, known: dict[str, int]) -> str:
    """The config's name of a language: "<|de|>" for "de", "german" and itself."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    asked = language.lower()
    code = TO_LANGUAGE_CODE.get(asked, asked)
    found = next((key for key in (asked, f"<|{code}|>") if key in known), None)
    if found is None:
        names = ", ".join(sorted(key.strip("<|>") for key in known))
        raise ParameterError(f"language must be one of {names}, got {language!r}")
    return found


def _heard(model: EncoderDecoderModel, source: Source, start: int) -> int:
    """The most likely language, judged by the decoder's first step."""
    known = torch.tensor(sorted(set(model.module.generation_config.lang_to_id.values())), device=model.device)
    sequence = model.open(source=source)
    try:
        logits = model.score([sequence], torch.tensor([[start]], device=model.device), [1], "last")
        assert logits is not None
        return int(known[logits[0, 0, known].argmax()])
    finally:
        sequence.close()


@dataclass(frozen=True)
class Rules:
    """bias: tokens that are never said, at -inf. processors: what depends on the tokens before.

    normalised: whether what is left of the log-probabilities is made to sum to one, which matters to beams alone.
    """

    bias: dict[int, float]
    processors: tuple[Processor, ...]
    normalised: bool = False


def decoder_rules(model: EncoderDecoderModel, prefix_length: int, max_new_tokens: int | None = None) -> Rules:
    """The config's forbidden and forced tokens, as transformers applies them and in its order.

    max_new_tokens: where the output ends at the latest, for a token that is forced there (BART); None to force none.
    """
    from transformers.generation import logits_process as made

    config = model.module.generation_config
    ignored = [name for name in _NOT_KEPT if getattr(config, name, None) not in (None, 0, 1.0)]
    if ignored:
        raise ModelError(f"{model.name} can't be used: its generation config sets {ignored[0]}, which is not kept here")
    ends = _inside(model, sorted(end_tokens(model)))
    words = [word for word in getattr(config, "bad_words_ids", None) or () if word not in [[end] for end in ends]]
    phrases = [word for word in words if len(word) > 1]
    never = {
        *_inside(model, getattr(config, "suppress_tokens", None)),
        *_inside(model, [w[0] for w in words if len(w) == 1]),
    }
    found: list[Processor] = []
    if getattr(config, "sequence_bias", None):
        found.append(made.SequenceBiasLogitsProcessor(config.sequence_bias))
    if getattr(config, "repetition_penalty", None) not in (None, 1.0):
        found.append(made.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if getattr(config, "no_repeat_ngram_size", None):
        found.append(made.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if phrases:
        found.append(made.NoBadWordsLogitsProcessor(phrases, list(ends) or None))
    fewest = _least_length(config, prefix_length)
    if ends and fewest > prefix_length:
        found.append(_Forbidden(ends, prefix_length, fewest))
    if forces_end(config) and max_new_tokens is not None:
        forced = config.forced_eos_token_id
        last = prefix_length + max_new_tokens - 1
        suppressed = _inside(model, getattr(config, "suppress_tokens", None))  # after forcing, so that it prevails
        said = [
            token for token in _inside(model, forced if isinstance(forced, list) else [forced]) if token not in suppressed
        ]
        if not said:
            raise ModelError(f"{model.name} can't be used: its generation config forces an end that it suppresses")
        found.append(_Forced(tuple(said), last))
    if first := _inside(model, getattr(config, "begin_suppress_tokens", None)):
        found.append(_Forbidden(first, prefix_length, prefix_length + 1))
    normalised = bool(getattr(config, "renormalize_logits", None))
    return Rules(dict.fromkeys(sorted(never), -math.inf), tuple(found), normalised)


def _least_length(config: Any, prefix_length: int) -> int:
    """Tokens before an end may come, those that the decoder begins with included; a forced first one counts as new."""
    fewest = getattr(config, "min_new_tokens", None)
    if fewest is None:
        return getattr(config, "min_length", None) or 0
    return int(prefix_length - forces_first(config) + fewest)


def forces_end(config: Any) -> bool:
    """Whether a generation config has a text end that has become as long as it may."""
    return getattr(config, "forced_eos_token_id", None) is not None


def forces_first(config: Any) -> bool:
    """Whether a generation config forces the first new token, which `decoder_prefix` has as its last."""
    return not _is_whisper(config) and getattr(config, "forced_bos_token_id", None) is not None


def _is_whisper(config: Any) -> bool:
    return hasattr(config, "no_timestamps_token_id") or hasattr(config, "lang_to_id")


def _inside(model: EncoderDecoderModel, tokens: Sequence[int] | None) -> tuple[int, ...]:
    """Those that the vocabulary has: configs name others, too, for none (-1) or of another size of the model."""
    return tuple(int(token) for token in tokens or () if 0 <= token < model.vocab_size)


@dataclass(frozen=True)
class _Forbidden:
    """Tokens that are not said while the sequence has first … until - 1 tokens. (transformers' own compare every entry of
    the vocabulary with every token in each call.)
    """

    tokens: tuple[int, ...]
    first: int
    until: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not self.first <= input_ids.shape[-1] < self.until:
            return scores
        return scores.index_fill(-1, index(self.tokens, scores.device), -math.inf)


@dataclass(frozen=True)
class _Forced:
    """Tokens one of which is said when the sequence has `at` tokens."""

    tokens: tuple[int, ...]
    at: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[-1] != self.at:
            return scores
        return torch.full_like(scores, -math.inf).index_fill(-1, index(self.tokens, scores.device), 0.0)
