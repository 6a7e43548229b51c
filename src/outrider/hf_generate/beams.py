"""`generate(num_beams=…)` by our beam search, with the draft's hypotheses checked in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.beam.laws import BeamLaw
from outrider.beam.length import BeamLength
from outrider.beam.records import BeamStats, summarise
from outrider.beam.search import BeamDecoder
from outrider.beam.state import Finished, Path
from outrider.beam.task import BeamTask
from outrider.errors import NumericalError, ParameterError
from outrider.forced import logits_along
from outrider.hf_generate.inputs import Inputs
from outrider.hf_generate.outputs import output, padded_sequences, padding, wanted_scores, warn_of_context
from outrider.hf_generate.rules import Limits, check_processors, row_processors
from outrider.models.base import LanguageModel
from outrider.models.transformers_model import TransformersModel
from outrider.settings.beams import BeamSettings


def search(
    target: TransformersModel,
    inputs: Inputs,
    input_ids: Tensor,
    processors: Sequence[Any],
    limits: Limits,
    config: Any,
    draft: LanguageModel | None,
    num_draft_tokens: int | None,
    stats: list[Any],
) -> Any:
    """The best texts of each prompt. → int64 [B · num_return_sequences, T], or the output object

    inputs: each prompt num_beams times, as `generate` has laid them out. stats: those of each prompt are appended.
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
    wanted = wanted_scores(config)
    found: list[Finished] = []
    steps: list[dict[str, Tensor]] = []
    for i in range(0, len(inputs.prompts), beams):
        law = BeamLaw(tuple(inputs.whole[i]), {}, row_processors(processors, i))
        task = BeamTask(inputs.prompts[i], inputs.sources[i], law)
        best, history, figures = _best(target, task, limits, settings, draft, num_draft_tokens, keep_history=bool(wanted))
        found += best
        stats.append(figures)
        steps.append(_scores(target, task, history, beams, wanted))
    begins = input_ids[::beams].repeat_interleave(settings.num_return_sequences, dim=0)
    sequences = padded_sequences([one.tokens for one in found], begins, padding(config, beams=True))
    if not config.return_dict_in_generate:
        return sequences
    further: dict[str, Any] = {
        "sequences_scores": torch.tensor([one.score for one in found], device=sequences.device),
        "beam_indices": _beam_indices(found, settings).to(sequences.device),
        **{name: _joined([one[name] for one in steps]) for name in wanted},
    }
    return output(target, sequences, further, beams=True)


def _beam_indices(found: Sequence[Finished], settings: BeamSettings) -> Tensor:
    """Of each text's tokens: the row, of num_beams for each prompt, that the token is a continuation of; -1 behind its end.

    → int32 [texts, T]
    """
    width = max(len(one.tokens) for one in found)
    rows = []
    for i, one in enumerate(found):
        first = i // settings.num_return_sequences * settings.num_beams
        rows.append([*(first + place for place in one.places), *[-1] * (width - len(one.places))])
    return torch.tensor(rows, dtype=torch.int32)


def _scores(
    target: TransformersModel, task: BeamTask, history: Sequence[tuple[Path, ...]], beams: int, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """`scores` (log-probabilities under the call's rules) and `logits` of the hypotheses that ran before each step, as far
    as they are wanted, each [steps, beams, V].

    From one more pass along each hypothesis that no later one goes on from. The first step has the prompt in every row; rows
    without a hypothesis, which vocabularies of a few tokens have, are impossible.
    """
    if not wanted:
        return {}
    shape = (len(history), beams, target.vocab_size)
    out = {name: torch.full(shape, -torch.inf, device=target.device) for name in wanted}
    for path, mine in _leaves(history).items():
        tokens = [*task.prompt, *path, 0]  # whatever comes last is predicted, not read
        along = torch.cat([chunk.float() for chunk in logits_along(target, tokens, len(task.prompt), task.source)])
        for n, place in mine:
            rows = slice(None) if n == 0 else slice(place, place + 1)
            if "logits" in out:
                out["logits"][n, rows] = along[n]
            if "scores" in out:
                out["scores"][n, rows] = task.law.logprobs(along[n : n + 1], [path[:n]]).float()
    return out


def _leaves(history: Sequence[tuple[Path, ...]]) -> dict[Path, list[tuple[int, int]]]:
    """Hypotheses that none goes on from, and the steps and places of all that lead to them, each named once."""
    leaf_of: dict[Path, Path] = {}
    for paths in reversed(history):
        for path in paths:
            if path not in leaf_of:
                leaf_of |= {path[:n]: path for n in range(len(path) + 1) if path[:n] not in leaf_of}
    found: dict[Path, list[tuple[int, int]]] = {}
    for n, paths in enumerate(history):
        for place, path in enumerate(paths):
            found.setdefault(leaf_of[path], []).append((n, place))
    return found


def _joined(steps: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of all prompts, [steps, beams, V] each → as many [prompts · beams, V] as the longest search has steps.

    Where one has come to its end before, nothing is told of it: zeros.
    """
    longest = max(len(one) for one in steps)
    filled = [torch.cat([one, one.new_zeros(longest - len(one), *one.shape[1:])]) for one in steps]
    return tuple(torch.cat(filled, dim=1).unbind(0))


def _best(
    target: TransformersModel,
    task: BeamTask,
    limits: Limits,
    settings: BeamSettings,
    draft: LanguageModel | None,
    num_draft_tokens: int | None,
    keep_history: bool,
) -> tuple[tuple[Finished, ...], list[tuple[Path, ...]], BeamStats]:
    """The best texts, the hypotheses that ran before each step if they are to be kept, and what it took."""
    decoder = BeamDecoder(
        target,
        task,
        settings,
        limits.new_tokens,
        limits.ends,
        draft,
        BeamLength(num_draft_tokens),
        keep_history=keep_history,
    )
    rounds = list(decoder.rounds())
    found = decoder.state.finished[: settings.num_return_sequences]
    if not found:
        raise NumericalError("the call's rules allow no text at all: loosen what must hold together")
    if len(found) < settings.num_return_sequences:
        most = len(found)
        raise ParameterError(f"num_return_sequences must be {most} at most here: the call's rules allow no further text")
    if decoder.cut_by_context and any(one.reason == "length" for one in found):
        warn_of_context(target)
    return found, decoder.history, summarise(rounds, decoder.prefill_seconds)
