"""What JSON says of an option, as `parse_options` takes it: of a line of a file of prompts, or of a request over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import ParameterError
from outrider.support.text import check_characters

SWITCHES = ("ignore_eos", "logprobs", "drafter_invariant")


def check_kinds(options: Mapping[str, Any]) -> None:
    """Raise for what `parse_options` would take for something else, or leave to chance."""
    value = options.get("seed")
    if "seed" in options and (isinstance(value, bool) or not isinstance(value, int)):
        raise ParameterError(f"seed must be a whole number, got {value!r}")
    value = options.get("stop")
    if "stop" in options and not isinstance(value, str | list):
        raise ParameterError(f"stop must be a string or a list of them, got {value!r}")
    for key in SWITCHES:
        if key in options and not isinstance(options[key], bool):
            raise ParameterError(f"{key} must be true or false, got {options[key]!r}")


def read_schema(schema: Any) -> str | None:
    """A JSON schema as its text; null is none."""
    if not isinstance(schema, dict | None):
        raise ParameterError(f"json_schema must be a JSON object or null, got {schema!r}")
    return None if schema is None else json.dumps(schema, ensure_ascii=False)


def read_regex(pattern: Any, name: str = "regex") -> str | None:
    """A regular expression, or a grammar; null is none."""
    if not isinstance(pattern, str | None):
        raise ParameterError(f"{name} must be a string or null, got {pattern!r}")
    return pattern


def read_biases(biases: Any) -> dict[int, float] | None:
    """JSON's keys are strings, and it has no number for what excludes a token; null is none."""
    if biases is None:
        return None
    wrong = ParameterError(f'logit_bias must be an object such as {{"17": -2.5}}, -Infinity excludes; got {biases!r}')
    if not isinstance(biases, dict) or any(isinstance(v, bool) or not isinstance(v, int | float) for v in biases.values()):
        raise wrong
    try:
        return {int(token): float(value) for token, value in biases.items()}
    except (ValueError, OverflowError):
        raise wrong from None


def read_prompt(prompt: Any) -> str | list[int]:
    """Text, or token ids."""
    if isinstance(prompt, str) and prompt:
        check_characters("prompt", prompt)
        return prompt
    if isinstance(prompt, list) and prompt and all(is_token(one) for one in prompt):
        return prompt
    raise ParameterError("prompt must be text or a list of token ids, not empty")


def is_token(value: Any) -> bool:
    """Whether it is a whole number; booleans are none."""
    return isinstance(value, int) and not isinstance(value, bool)
