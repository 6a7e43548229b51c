"""`generate(num_beams=…)` by our beam search, with the draft's hypotheses checked in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.beam.laws import BeamLaw
from outrider.beam.length import BeamLength
from outrider.beam.search import BeamDecoder
from outrider.beam.settings import BeamSettings
from outrider.beam.state import Finished
from outrider.beam.task import BeamTask
from outrider.errors import ParameterError
from outrider.hf_generate.inputs import Inputs
from outrider.hf_generate.outputs import output, padded_sequences, padding, warn_of_context
from outrider.hf_generate.rules import Limits, check_processors, row_processors
from outrider.models.base import LanguageModel
from outrider.models.transformers_model import TransformersModel


def search(
    target: TransformersModel,
    inputs: Inputs,
    input_ids: Tensor,
    processors: Sequence[Any],
    limits: Limits,
    config: Any,
    draft: LanguageModel | None,
    num_draft_tokens: int | None,
) -> Any:
    """The best texts of each prompt. → int64 [B · num_return_sequences, T], or the output object

    inputs: each prompt num_beams times, as `generate` has laid them out.
    """
    if limits.further:
        got = type(limits.further[0]).__name__
        raise ParameterError(f"stopping criteria must be lengths and ends for beam search, got {got}: leave it out")
    beams = int(config.num_beams)
    settings = BeamSettings(
        beams,
        1.0 if config.length_penalty is None else float(config.length_penalty),
        False if config.early_stopping is None else config.early_stopping,
        config.num_return_sequences or 1,
    )
    check_processors(processors, len(inputs.prompts) // beams)
    found: list[Finished] = []
    for i in range(0, len(inputs.prompts), beams):
        law = BeamLaw(tuple(inputs.whole[i]), {}, row_processors(processors, i))
        task = BeamTask(inputs.prompts[i], inputs.sources[i], law)
        found += _best(target, task, limits, settings, draft, num_draft_tokens)
    begins = input_ids[::beams].repeat_interleave(settings.num_return_sequences, dim=0)
    sequences = padded_sequences([one.tokens for one in found], begins, padding(config, beams=True))
    if not config.return_dict_in_generate:
        return sequences
    scores = torch.tensor([one.score for one in found], device=sequences.device)
    return output(target, sequences, {"sequences_scores": scores}, beams=True)


def _best(
    target: TransformersModel,
    task: BeamTask,
    limits: Limits,
    settings: BeamSettings,
    draft: LanguageModel | None,
    num_draft_tokens: int | None,
) -> tuple[Finished, ...]:
    length = BeamLength(num_draft_tokens)
    decoder = BeamDecoder(target, task, settings, limits.new_tokens, limits.ends, draft, length)
    for _ in decoder.rounds():
        pass
    found = decoder.state.finished[: settings.num_return_sequences]
    if len(found) < settings.num_return_sequences:
        most = len(found)
        raise ParameterError(f"num_return_sequences must be {most} at most here: the call's rules allow no further text")
    if decoder.cut_by_context and any(one.reason == "length" for one in found):
        warn_of_context(target)
    return found
