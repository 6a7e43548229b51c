"""The drop-in for people who stay with transformers.

    model.generate(**inputs, custom_generate=outrider.transformers_generate, assistant_model=draft_model)

takes what `generate` takes and returns what it returns, for decoder-only models and encoder–decoders, with one beam or
several. Sampling settings, processors, stopping criteria, the streamer and the seed (torch's global one) are the call's.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from outrider.decode import Decoder, Request
from outrider.drafters import Drafter
from outrider.errors import ParameterError
from outrider.hf_generate.beams import search
from outrider.hf_generate.engines import OPENING, beam_draft, drafter_of, engine_of, held_alone
from outrider.hf_generate.inputs import Inputs, read_inputs, refuse_inputs, refuse_settings
from outrider.hf_generate.outputs import output, padded_sequences, padding, scores_along, warn_of_context
from outrider.hf_generate.rules import Limits, check_processors, loop_processors
from outrider.models.encoder_decoder import EncoderDecoderModel
from outrider.models.rollback import refuse_without_rollback
from outrider.models.transformers_model import TransformersModel
from outrider.randomness import stream_after
from outrider.records import Round, Stats, summarise
from outrider.request.choices import make_length
from outrider.request.invariance import tell_of_rounding
from outrider.sampling import SamplingSettings
from outrider.support.checks import check_switch


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
    drafter_invariant: bool = False,
    stats: list[Any] | None = None,
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Any:
    """Called by `generate` as its decoding method. → int64 [B, T], or the output object if `return_dict_in_generate`.

    assistant_model: a transformers model as the draft; without one, draft="auto": the context, or the source, is copied.
    draft, num_draft_tokens, drafter_invariant: as in `outrider.generate`, or a transformers model; give them to
    `model.generate`.
    stats: a list to which the statistics of each row are appended, an `outrider.results.Stats` (of each prompt that is
    searched for, a `BeamStats`): what was drafted and accepted, seconds by phase.
    inputs_tensor: what an encoder reads; `generate` gives it.
    """
    assistant_model = assistant_model if assistant_model is not None else _from_caller("assistant_model")
    streamer = streamer if streamer is not None else _from_caller("streamer")
    refuse_settings(generation_config, input_ids, streamer, bool(synced_gpus or _from_caller("synced_gpus")))
    refuse_without_rollback(model, type(model).__name__, model.config.is_encoder_decoder, keeps_states=True)
    refuse_inputs(model, input_ids, model_kwargs)
    beams = (generation_config.num_beams or 1) > 1
    drafter_invariant = check_switch("drafter_invariant", drafter_invariant)
    if stats is not None and not isinstance(stats, list):
        raise ParameterError(f"stats must be a list, to which those of each row are appended, got {type(stats).__name__}")
    found: list[Any] = [] if stats is None else stats
    if beams and drafter_invariant:
        raise ParameterError("drafter_invariant is about what is sampled, and beams are searched for: leave it out")
    with OPENING.lock:
        target = engine_of(model)
        drafter = None if beams else drafter_of(assistant_model, draft, target)
        of_beams = beam_draft(assistant_model, draft, target) if beams else None
    copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)

    def decode() -> Any:
        limits = Limits.of(input_ids.shape[1], generation_config, stopping_criteria)
        inputs = read_inputs(target, input_ids, inputs_tensor, model_kwargs, copies, limits.new_tokens)
        given = tuple(logits_processor or ())
        with target.encoded(inputs.states) if isinstance(target, EncoderDecoderModel) else nullcontext():
            if beams:
                return search(target, inputs, input_ids, given, limits, generation_config, of_beams, num_draft_tokens, found)
            drafted = _Drafted(drafter, num_draft_tokens, drafter_invariant)
            return _sampled(target, inputs, input_ids, given, limits, generation_config, drafted, streamer, found)

    return held_alone(target, drafter, of_beams, decode)


@dataclass(frozen=True)
class _Drafted:
    """How texts that are not searched for are drafted: see `transformers_generate`."""

    drafter: Drafter | None
    num_draft_tokens: int | None
    invariant: bool


def _sampled(
    target: TransformersModel,
    inputs: Inputs,
    input_ids: Tensor,
    given: tuple[Any, ...],
    limits: Limits,
    config: Any,
    drafted: _Drafted,
    streamer: Any,
    stats: list[Any],
) -> Any:
    """Greedy or drawn: one text a row."""
    limits.refuse_rows(len(inputs.prompts))
    check_processors(given, len(inputs.prompts))
    processors = loop_processors(given, inputs)
    decoder = _decoder(target, inputs, limits, processors, config, drafted)
    stats += _run(decoder, streamer)
    if any(row.finish_reason == "context" for row in decoder.rows):
        warn_of_context(target)
    new = [row.tokens[row.draft.prompt_length :] for row in decoder.rows]
    sequences = padded_sequences(new, input_ids, padding(config))
    if not config.return_dict_in_generate:
        return sequences
    rows = [(row.tokens, row.draft.prompt_length) for row in decoder.rows]
    return output(target, sequences, scores_along(target, rows, inputs.sources, processors, config))


def _decoder(
    target: TransformersModel,
    inputs: Inputs,
    limits: Limits,
    processors: tuple[Any, ...],
    config: Any,
    drafted: _Drafted,
) -> Decoder:
    # Drawn from torch's global generator, so that torch.manual_seed governs it.
    seed = int(torch.randint(2**62, ())) if config.do_sample else 0
    drafter = drafted.drafter
    if drafted.invariant and config.do_sample and drafter is not None:
        tell_of_rounding(target)
    if drafter is not None:
        drafter.bind(target)
    requests = []
    for i, (prompt, source) in enumerate(zip(inputs.prompts, inputs.sources, strict=True)):
        occasion = drafter.occasion() if drafter is not None else ()
        stream = stream_after(seed, i, prompt, source, occasion, drafted.invariant)
        requests.append(Request(prompt, limits.new_tokens, stream, limits.ends, limits.stop(inputs.whole[i]), source))
    sampling = SamplingSettings(temperature=1.0 if config.do_sample else 0.0, processors=processors)
    length = make_length(drafted.num_draft_tokens, target, drafter, len(requests))
    return Decoder(target, requests, sampling, drafter, length if len(requests) == 1 else length.together(len(requests)))


def _run(decoder: Decoder, streamer: Any) -> list[Stats]:
    """→ each row's"""
    rounds: dict[int, list[Round]] = {}
    for batch in decoder.rounds():
        for number, record in batch:
            rounds.setdefault(number, []).append(record)
            if streamer is not None:
                streamer.put(torch.tensor(record.tokens))
    if streamer is not None:
        streamer.end()
    return [summarise(rounds.get(i, ()), row.prefill_seconds) for i, row in enumerate(decoder.rows)]


def _from_caller(name: str) -> Any:
    """A local of the `generate` call that called us.

    transformers (5.23) drops `assistant_model`, `streamer` and `synced_gpus` on the way to a custom_generate function: its
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
