"""Output that follows a JSON schema, a regular expression or a grammar, with speculation as without.

The matching is llguidance's (extra `structured`); here it is only rolled back with the sequence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ParameterError, in_one_line
from outrider.support.optional import optional

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.models.base import TextModel
    from outrider.sampling.stateful import Constraint

_log = logging.getLogger(__name__)
_KEPT_AS = "_outrider_guidance"
_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar"}


@dataclass(frozen=True)
class Structure:
    """What a text must follow, said before there is a model: a JSON schema's text, a regular expression, or both."""

    json_schema: str | None = None
    regex: str | None = None

    def check(self, ignore_eos: bool = False) -> None:
        """Raise `ParameterError` for what can't be followed by any model, `MissingPackageError` without llguidance.

        ignore_eos: whether texts are to go on behind their end, where no structure says what may come.
        """
        if ignore_eos:
            raise ParameterError("ignore_eos must be false with a schema or regex, which say where texts end: leave it out")
        for kind, text in self._given():
            _compiled(kind, text)

    def constraints(self, model: TextModel) -> tuple[Constraint, ...]:
        """For `processors`."""
        return tuple(_constraint(model, kind, text) for kind, text in self._given())

    def complete(self, model: TextModel, tokens: Sequence[int]) -> bool:
        """Whether a text of these new tokens may end there: one that was cut may not."""
        guidance, tokenizer = _library(), _tokenizer(model)
        matchers = [guidance.LLMatcher(tokenizer, _compiled(kind, text)) for kind, text in self._given()]
        return all(one.try_consume_tokens(list(tokens)) == len(tokens) and one.is_accepting() for one in matchers)

    def _given(self) -> list[tuple[str, str]]:
        both = (("json_schema", self.json_schema), ("regex", self.regex))
        return [(kind, text) for kind, text in both if text is not None]


def json_schema(model: TextModel, schema: Mapping[str, Any] | str) -> Constraint:
    """New text is JSON that fits the schema (a dictionary, or its text)."""
    return _constraint(model, "json_schema", json.dumps(dict(schema)) if isinstance(schema, Mapping) else schema)


def regex(model: TextModel, pattern: str) -> Constraint:
    """New text matches the whole regular expression."""
    return _constraint(model, "regex", pattern)


def grammar(model: TextModel, lark: str) -> Constraint:
    """New text follows a context-free grammar in llguidance's Lark notation."""
    return _constraint(model, "lark", lark)


def _constraint(model: TextModel, kind: str, text: str) -> Constraint:
    from outrider.models.compatibility import fingerprint  # which need torch, unlike what a schema is checked by
    from outrider.sampling.stateful import Constraint

    if not isinstance(text, str):
        raise ParameterError(f"{_NAMES[kind]} must be text, got {text!r:.60}")
    compiled = _compiled(kind, text)
    guidance, tokenizer = _library(), _tokenizer(model)
    _refuse(kind, guidance.LLMatcher.validate_grammar(compiled, tokenizer))
    size = model.vocab_size  # the model itself is not held
    return Constraint(lambda: _Matcher(guidance.LLMatcher(tokenizer, compiled), size), fingerprint(model))


def _compiled(kind: str, text: str) -> str:
    """What llguidance makes of it, for any tokenizer."""
    guidance = _library()
    if kind == "json_schema":
        try:
            json.loads(text)
        except ValueError as error:
            raise ParameterError(f"json_schema must be JSON, got {text[:60]!r}: {error}") from None
    compiled: str = getattr(guidance.LLMatcher, f"grammar_from_{kind}")(text)
    _refuse(kind, guidance.LLMatcher.validate_grammar(compiled))
    return compiled


def _refuse(kind: str, problem: str) -> None:
    if problem:
        raise ParameterError(f"{_NAMES[kind]} can't be used: {' '.join(problem.split())[:200]}")


def _library() -> Any:
    return optional("llguidance", "structured output")


def _tokenizer(model: TextModel) -> Any:
    """Llguidance's view of the model's tokens, made once (it takes a second)."""
    made = model.__dict__.get(_KEPT_AS)
    if made is None:
        from llguidance.hf import from_tokenizer

        made = from_tokenizer(model.tokenizer, n_vocab=model.vocab_size)
        model.__dict__[_KEPT_AS] = made
    return made


class _Matcher:
    """A `sampling.stateful.Matcher` around llguidance's, which never raises: at its limits it can't go on, nor back."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self) -> Tensor | None:
        from torch import from_numpy

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            _log.debug("a text can't be followed any further: %s", in_one_line(self._matcher.get_error()))
            return None
        return from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool))

    def advance(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1 or self._matcher.is_error())

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
