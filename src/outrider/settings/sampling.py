"""What to sample from: the settings that turn logits into a distribution (Leviathan 2.2, "standardized sampling")."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from outrider.errors import ParameterError
from outrider.support.checks import check_count, check_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class KeepsState(ABC):
    """A processor that keeps a state along a sequence, and finds it by the tokens (`sampling.stateful`).

    constrains: it forbids tokens, says where a text may end, and does nothing else. Any other one is taken for a user's
    code, which may raise for one text alone, or generate with the same model.
    """

    constrains = False

    @abstractmethod
    def apply(self, tokens: Tensor, prompt_length: int, scores: Tensor) -> Tensor:
        """Tokens int64 [T], the first `prompt_length` of them the prompt; scores [V] → [V]"""


LogitsProcessor: TypeAlias = "Callable[[Tensor, Tensor], Tensor] | KeepsState"
"""Hugging Face's interface: (input_ids [1, T], scores [1, V]) → scores [1, V], a function of its arguments only; or one that
keeps a state, wrapped so that it rolls back with the sequence."""


def constrains(processor: LogitsProcessor) -> bool:
    """See `KeepsState`."""
    return isinstance(processor, KeepsState) and processor.constrains


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling law, applied in the order of the fields to target, draft and plain decoding alike.

    logit_bias: {token: added to its logit}; -inf excludes the token.
    repetition_penalty: > 1 weakens tokens that stand in the prompt or the output (Keskar 2019; Hugging Face's rule).
    presence_penalty, frequency_penalty: subtracted once, and once an occurrence, for tokens of the *output* (OpenAI's).
    processors: Hugging Face `LogitsProcessor`s, called in turn.
    temperature: 0 gives a one-hot distribution (the first of equal maxima); then nothing below matters.
    top_k: keep the k largest logits, 0 for all. Equal logits at the edge are kept together.
    top_p: keep the smallest set of most likely tokens whose mass reaches top_p, ties at the edge together; 1 keeps all.
    min_p: drop tokens less likely than min_p × the most likely one.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    processors: tuple[LogitsProcessor, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        huge = 1e6
        check_number("temperature", self.temperature, 0.0, huge, "in 0 … 1e6", "use 0 for greedy, 1 for none")
        if 0.0 < self.temperature < 1e-6:
            raise ParameterError(f"temperature must be 0 or at least 1e-6, got {self.temperature}: use 0 for greedy")
        check_count("top_k", self.top_k, 0, remedy="use 0 for no limit")
        check_number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]", "use 1 for no limit")
        if self.top_p == 0.0:
            raise ParameterError("top_p must be in (0, 1], got 0: use temperature=0 for greedy decoding")
        check_number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]", "use 0 for no limit")
        tiny = math.ulp(0.0)
        check_number("repetition_penalty", self.repetition_penalty, tiny, huge, "above 0 and 1e6 at most", "use 1 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -huge, huge, "in -1e6 … 1e6", "use 0 for none")
        if not isinstance(self.logit_bias, Mapping):
            raise ParameterError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}: leave it out for none")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ParameterError(f"logit_bias must map token ids of 0 or more to numbers, got the key {token!r}")
            check_number(
                f"logit_bias[{token}]", bias, -math.inf, sys.float_info.max, "a number or -inf", "use -inf to exclude"
            )

    @property
    def calls_back(self) -> bool:
        """Whether a processor may do anything while it is asked: generate with the same model, say."""
        return not all(map(constrains, self.processors))

    def check_bias(self, vocab_size: int) -> None:
        """Raise if the bias names tokens that there are none of."""
        if self.logit_bias and max(self.logit_bias) >= vocab_size:
            raise ParameterError(f"logit_bias names token {max(self.logit_bias)}, the vocabulary ends at {vocab_size - 1}")

    @property
    def greedy(self) -> bool:
        """Whether the law is one-hot."""
        return self.temperature == 0.0

    @property
    def law(self) -> tuple[float, int, float, float]:
        """What makes a law of logits: temperature, top_k (as far as a machine counts), top_p, min_p."""
        return float(self.temperature), min(int(self.top_k), sys.maxsize), float(self.top_p), float(self.min_p)

    def processed_only(self) -> SamplingSettings:
        """Bias, penalties and processors alone: temperature 1, and no truncation."""
        return replace(self, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    def options(self) -> dict[str, Any]:
        """The fields as keywords, as `generate` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def needs_context(self) -> bool:
        """Whether the law at a position depends on the tokens before it beyond the logits."""
        penalised = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        return penalised or bool(self.processors)

    @property
    def as_they_are(self) -> bool:
        """Whether logits become a law unchanged: no bias, penalty or processor comes before temperature and truncation."""
        return not self.logit_bias and not self.needs_context
