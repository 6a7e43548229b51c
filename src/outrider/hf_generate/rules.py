"""The call's processors and stopping criteria, for the loop and for beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Self

import torch
from torch import Tensor

from outrider.errors import ParameterError
from outrider.hf_generate.inputs import Inputs
from outrider.sampling.penalties import apply_processors

_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
_BY_ROW = (
    "PrefixConstrainedLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "WhisperNoSpeechDetection",
)


def check_processors(given: Sequence[Any], rows: int) -> None:
    """Raise for those that can't be asked about one row at a time, out of order. rows: prompts, each with its copies."""
    for name in (type(processor).__name__ for processor in given):
        if name in _STATEFUL:
            raise ParameterError(f"{name} can't be used with speculation, it keeps a state of its own: leave it out")
        if rows > 1 and name in _BY_ROW:
            raise ParameterError(f"{name} must be used with one row, got {rows}: it depends on the row, copies are rows")


def row_processors(given: Sequence[Any], row: int) -> tuple[Any, ...]:
    """The call's processors for one of its rows. They are called with that row's tokens alone, [1, n]."""
    from transformers import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor

    found = []
    for processor in given:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, torch.Tensor):
            found.append(RepetitionPenaltyLogitsProcessor(processor.penalty, int(ignored[row])))
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):  # it sees one hypothesis, not all beams of a row
            found.append(PrefixConstrainedLogitsProcessor(processor._prefix_allowed_tokens_fn, 1))
        else:
            found.append(processor)
    return tuple(found)


def loop_processors(given: Sequence[Any], inputs: Inputs) -> tuple[Any, ...]:
    """The call's processors for the loop, whose rows have no padding."""
    if not given or not (inputs.padded or any(map(_differs_by_row, given))):
        return row_processors(given, 0)
    return (_WithPadding(given, inputs),)


def _differs_by_row(processor: Any) -> bool:
    ignored = getattr(processor, "prompt_ignore_length", None)
    return isinstance(ignored, torch.Tensor) and len(set(ignored.reshape(-1).tolist())) > 1


def _ignored_by(given: Sequence[Any], row: int) -> list[int]:
    """The `prompt_ignore_length` of those processors that have one for each row."""
    all_of_them = (getattr(processor, "prompt_ignore_length", None) for processor in given)
    return [int(ignored[row]) for ignored in all_of_them if isinstance(ignored, torch.Tensor)]


class _WithPadding:
    """The processors of rows that differ: each sees its row as `generate` has it. A row is known by its prompt."""

    def __init__(self, given: Sequence[Any], inputs: Inputs) -> None:
        ignored = {(tuple(prompt), *_ignored_by(given, i)) for i, prompt in enumerate(inputs.prompts)}
        if len({prompt for prompt, *_ in ignored}) < len(ignored):
            raise ParameterError("prompts of one call must differ where prompt_ignore_length does: one prompt a call")
        rows = {
            (tuple(prompt), tuple(whole)): row_processors(given, i)
            for i, (prompt, whole) in enumerate(zip(inputs.prompts, inputs.whole, strict=True))
        }
        self._rows = [(prompt, whole, processors) for (prompt, whole), processors in rows.items()]
        for (one, _, _), (other, _, _) in combinations(self._rows, 2):
            shared = min(len(one), len(other))
            if one[:shared] == other[:shared]:
                raise ParameterError(
                    "prompts of one call must not begin with another one that is padded otherwise, where processors see the "
                    "padding: one prompt a call"
                )

    def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
        ids = tuple(tokens[0].tolist())
        prompt, whole, processors = next(row for row in self._rows if ids[: len(row[0])] == row[0])
        seen = tokens.new_tensor([*whole, *ids[len(prompt) :]])
        return apply_processors(scores[0], seen, len(whole), processors).unsqueeze(0)


@dataclass(frozen=True)
class Limits:
    """Where texts end. further: stopping criteria of other kinds than a length and ends."""

    new_tokens: int
    ends: frozenset[int]
    further: tuple[Any, ...]

    @classmethod
    def of(cls, length: int, config: Any, criteria: Any) -> Self:
        """Of a call. length: of its prompts. The caller's criteria have replaced those that `generate` makes of a config."""
        from transformers import EosTokenCriteria, MaxLengthCriteria

        given = list(criteria or ())
        lengths = [criterion.max_length for criterion in given if type(criterion) is MaxLengthCriteria]
        named = [criterion.eos_token_id for criterion in given if type(criterion) is EosTokenCriteria]
        if not named and config.eos_token_id is not None:
            named = [torch.as_tensor(config.eos_token_id)]
        ends = frozenset(int(token) for tokens in named for token in tokens.reshape(-1).tolist())
        further = tuple(criterion for criterion in given if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria))
        new_tokens = max(1, int(min(lengths, default=config.max_length)) - length)  # `generate` asks after the first
        return cls(new_tokens, ends, further)

    def refuse_rows(self, rows: int) -> None:
        """Raise where `generate` lets rows that have ended write on: nothing but criteria of the caller's own ends them."""
        if rows > 1 and self.further and not self.ends:
            name = type(self.further[0]).__name__
            raise ParameterError(f"eos_token_id must be given beside {name} for {rows} prompts, or one prompt a call")

    def stop(self, whole: list[int]) -> _Criteria | None:
        """The further criteria, for one row. whole: its prompt, padding included."""
        return _Criteria(self.further, whole) if self.further else None


class _Criteria:
    """transformers' stopping criteria, asked after every token as `generate` does."""

    def __init__(self, criteria: Sequence[Any], whole: list[int]) -> None:
        self._criteria = criteria
        self._tokens = list(whole)

    def __call__(self, new: Sequence[int]) -> int | None:
        for i, token in enumerate(new):
            self._tokens.append(token)
            ids = torch.tensor([self._tokens])
            if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self._criteria):
                return i + 1
        return None
