"""The drop-in for people who stay with transformers.

    model.generate(**inputs, custom_generate=outrider.transformers_generate, assistant_model=draft_model)

takes what `generate` takes and returns what it returns. Sampling settings, processors, stopping criteria, the streamer and
the seed (torch's global one) are those of the call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from outrider.choices import make_drafter, make_length
from outrider.decode import Decoder, Request
from outrider.drafters import Drafter, ModelDrafter
from outrider.errors import ParameterError
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings

_KEPT_AS = "_outrider_engine"
_COUNTS_PADDING = (
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
_BY_ROW = (
    "PrefixConstrainedLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
)
_UNSUPPORTED = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")


def transformers_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    assistant_model: Any = None,
    draft: Any = None,
    num_draft_tokens: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Called by `generate` as its decoding method. → int64 [B, T], or the output object if `return_dict_in_generate`.

    assistant_model: a transformers model as the draft; without one, draft="auto": the context is copied.
    draft, num_draft_tokens: as in `outrider.generate`; give them to `model.generate`.
    """
    del synced_gpus
    assistant_model = assistant_model if assistant_model is not None else _from_caller("assistant_model")
    streamer = streamer if streamer is not None else _from_caller("streamer")
    _refuse(generation_config, input_ids, streamer)
    _refuse_inputs(input_ids, model_kwargs)
    target = _engine(model)
    drafter = _drafter(assistant_model, draft, target)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    padded = any(len(prompt) < input_ids.shape[1] for prompt in prompts)
    processors = _processors(logits_processor or (), len(prompts), padded)
    sampling = SamplingSettings(temperature=1.0 if generation_config.do_sample else 0.0, processors=processors)
    decoder = Decoder(
        target,
        _requests(prompts, input_ids, generation_config, stopping_criteria),
        sampling,
        drafter,
        make_length(num_draft_tokens, target, drafter),
    )
    for batch in decoder.rounds():
        for _, record in batch:
            if streamer is not None:
                streamer.put(torch.tensor(record.tokens))
    if streamer is not None:
        streamer.end()
    return _output(decoder, input_ids, generation_config)


def _from_caller(name: str) -> Any:
    """A local of the `generate` call that called us.

    transformers (5.23) drops `assistant_model` and `streamer` on the way to a custom_generate function: its
    `_extract_generation_mode_kwargs` keeps only keywords that `generate` itself does not name.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code.co_name == "generate" and name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


def _refuse(config: Any, input_ids: Tensor, streamer: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise ParameterError(f"num_beams must be 1 with outrider.transformers_generate, got {config.num_beams}")
    asked = [name for name in _UNSUPPORTED if getattr(config, name, None)]
    if asked:
        raise ParameterError(f"{asked[0]} is not available with outrider.transformers_generate: leave it out")
    if streamer is not None and len(input_ids) > 1:
        raise ParameterError(f"streamer must go with one prompt, got {len(input_ids)}: leave it out")


def _refuse_inputs(input_ids: Tensor, given: dict[str, Any]) -> None:
    """Raise for inputs of the model that would be ignored; `generate` itself adds some harmless ones."""
    remedy = "with outrider.transformers_generate: leave it out"
    known = ("past_key_values", "position_ids", "attention_mask", "use_cache", "cache_position", "logits_to_keep")
    unknown = [name for name, value in given.items() if value is not None and name not in known]
    if unknown:
        raise ParameterError(f"{unknown[0]} is not available {remedy}")
    past = given.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ParameterError(f"past_key_values must be empty {remedy}")
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None:
        real = torch.ones_like(input_ids) if mask is None else mask.long()
        own = positions.expand(len(input_ids), -1)[:, -real.shape[1] :]
        if not bool(((own == real.cumsum(-1) - 1) | (real == 0)).all()):
            raise ParameterError(f"position_ids must count the tokens {remedy}")


def _engine(model: Any) -> TransformersModel:
    """The engine around a model, kept on the model, since opening it costs a few forward passes."""
    engine = model.__dict__.get(_KEPT_AS)
    embedding = model.get_input_embeddings().weight
    as_opened = (model.dtype, model.device, model.config._attn_implementation, tuple(embedding.shape))
    if engine is None or engine[0] != as_opened:
        engine = (as_opened, TransformersModel(model))
        model.__dict__[_KEPT_AS] = engine
    return engine[1]  # type: ignore[no-any-return]


def _drafter(assistant_model: Any, draft: Any, target: TransformersModel) -> Drafter | None:
    if assistant_model is None:
        return make_drafter("auto" if draft is None else draft, target)
    if draft is not None:
        raise ParameterError("draft and assistant_model must not both be given: leave one out")
    return SameTokensDrafter(_engine(assistant_model))


class SameTokensDrafter(ModelDrafter):
    """No tokenizers here: like `generate`, take the caller's word that both models share one, whatever the padding."""

    def bind(self, target: Any) -> None:
        del target


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without their padding, on either side."""
    if attention_mask is None:
        return [list(map(int, row)) for row in input_ids.tolist()]
    mask = attention_mask.bool().cpu()
    return [list(map(int, row[keep].tolist())) for row, keep in zip(input_ids.cpu(), mask, strict=True)]


def _processors(given: Sequence[Any], rows: int, padded: bool) -> tuple[Any, ...]:
    """The call's processors, for rows without padding: they see one row at a time, as the tokens it really has."""
    from transformers import RepetitionPenaltyLogitsProcessor

    found = []
    for processor in given:
        name = type(processor).__name__
        if name in _STATEFUL:
            raise ParameterError(f"{name} can't be used with speculation, it keeps a state of its own: leave it out")
        if rows > 1 and name in _BY_ROW:
            raise ParameterError(f"{name} must be used with one prompt, got {rows}: it depends on the row")
        if padded and name in _COUNTS_PADDING:
            raise ParameterError(f"{name} must not be used with padded prompts, it counts the padding: one prompt a call")
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(processor.prompt_ignore_length, Tensor):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty)  # noqa: PLW2901 - what it ignored is gone
        found.append(processor)
    return tuple(found)


def _requests(prompts: list[list[int]], input_ids: Tensor, config: Any, criteria: Any) -> list[Request]:
    from transformers import EosTokenCriteria, MaxLengthCriteria

    # The caller's criteria of these two kinds have replaced those that `generate` makes of its config.
    given = list(criteria or ())
    limits = [criterion.max_length for criterion in given if type(criterion) is MaxLengthCriteria]
    new_tokens = int(min(limits, default=config.max_length)) - input_ids.shape[1]
    named = [criterion.eos_token_id for criterion in given if type(criterion) is EosTokenCriteria]
    if not named and config.eos_token_id is not None:
        named = [torch.as_tensor(config.eos_token_id)]
    ends = frozenset(int(token) for tokens in named for token in tokens.reshape(-1).tolist())
    seed = int(torch.randint(2**62, ()))  # drawn from torch's global generator, so that torch.manual_seed governs it
    further = [criterion for criterion in given if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)]
    return [
        Request(prompt, new_tokens, RandomStream(seed, i), ends, _Criteria(further, prompt) if further else None)
        for i, prompt in enumerate(prompts)
    ]


class _Criteria:
    """transformers' stopping criteria, asked after every token as `generate` does."""

    def __init__(self, criteria: Sequence[Any], prompt: list[int]) -> None:
        self._criteria = criteria
        self._tokens = list(prompt)

    def __call__(self, new: Sequence[int]) -> int | None:
        for i, token in enumerate(new):
            self._tokens.append(token)
            ids = torch.tensor([self._tokens])
            if any(bool(criterion(ids, None).all()) for criterion in self._criteria):
                return i + 1
        return None


def _output(decoder: Decoder, input_ids: Tensor, config: Any) -> Any:
    new = [row.tokens[row.draft.prompt_length :] for row in decoder.rows]
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    width = max(map(len, new))
    tail = torch.tensor([row + [pad] * (width - len(row)) for row in new], dtype=input_ids.dtype)
    sequences = torch.cat([input_ids, tail.to(input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)
