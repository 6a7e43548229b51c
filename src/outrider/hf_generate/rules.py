"""The call's processors and stopping criteria, for the loop and for beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from outrider.errors import ParameterError

_COUNTS_PADDING = (
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
)
_STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
_BY_ROW = (
    "PrefixConstrainedLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "WhisperNoSpeechDetection",
)


def one_row_processors(given: Sequence[Any], rows: int, padded: bool) -> tuple[Any, ...]:
    """The call's processors, for rows without padding: they see one row at a time, as the tokens it really has."""
    from transformers import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor

    found = []
    for processor in given:
        name = type(processor).__name__
        if name in _STATEFUL:
            raise ParameterError(f"{name} can't be used with speculation, it keeps a state of its own: leave it out")
        if rows > 1 and name in _BY_ROW:
            raise ParameterError(f"{name} must be used with one prompt, got {rows}: it depends on the row")
        if padded and name in _COUNTS_PADDING:
            raise ParameterError(f"{name} must not be used with padded prompts, it counts the padding: one prompt a call")
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
            processor.prompt_ignore_length, torch.Tensor
        ):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty)  # noqa: PLW2901 - what it ignored is gone
        if isinstance(processor, PrefixConstrainedLogitsProcessor):  # it sees one hypothesis, not all beams of a row
            processor = PrefixConstrainedLogitsProcessor(processor._prefix_allowed_tokens_fn, 1)  # noqa: PLW2901
        found.append(processor)
    return tuple(found)


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
        return cls(int(min(lengths, default=config.max_length)) - length, ends, further)

    def stop(self, prompt: list[int]) -> _Criteria | None:
        """The further criteria, for one row."""
        return _Criteria(self.further, prompt) if self.further else None


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
