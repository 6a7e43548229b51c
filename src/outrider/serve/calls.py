"""What a request over HTTP asks for: OpenAI's fields, and those of vLLM and llama.cpp that many clients send.

Nothing is ignored that could change an answer: a field that is not served is refused by name, unless it is null or has the
value that means "off".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.errors import ParameterError
from outrider.request.from_json import check_kinds, is_token, read_biases, read_prompt, read_regex, read_schema
from outrider.support.checks import check_count, check_switch

MOST_TEXTS = 128  # of one request
MOST_TOP = 20  # as OpenAI has it
_LEGACY_TOKENS = 16  # of a completion that names no limit, as OpenAI has it

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "seed", "ignore_eos", "drafter_invariant"),
)
_OWN = (
    *("model", "n", "stream", "stream_options", "max_tokens", "logit_bias", "logprobs", "response_format"),
    *("structured_outputs", "return_token_ids", "repeat_penalty", "repeat_last_n"),
)
_OF_CHATS = ("messages", "max_completion_tokens", "top_logprobs")
_OF_COMPLETIONS = ("prompt",)
_ABOUT_OTHER_THINGS = (  # who asks, what is kept and paid, and what servers tell beside: no text depends on them
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("cache_prompt", "return_tokens", "timings_per_token", "request_id", "priority"),
)
_OFF: Mapping[str, tuple[Any, ...]] = {  # the values that ask for nothing
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n_probs": (0,),
    "parallel_tool_calls": (True, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}


class NotServedError(ParameterError):
    """A request asks for something that this server does not do. param: the field."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class Structured:
    """What a text must follow. kind: a function of `outrider.structured`."""

    kind: str
    text: str


@dataclass(frozen=True)
class Call:
    """A request, checked as far as it can be without the model.

    prompts: text, token ids, or messages. options: of `ContinuousBatch.submit`. count: answers to each prompt. top: the most
    probable tokens that are told beside each, None without log-probabilities. usage: whether a stream ends by it.
    """

    prompts: list[Any]
    options: dict[str, Any]
    structured: tuple[Structured, ...] = ()
    model: str | None = None
    count: int = 1
    stream: bool = False
    usage: bool = False
    top: int | None = None
    token_ids: bool = False

    @property
    def texts(self) -> int:
        """How many are asked for."""
        return len(self.prompts) * self.count

    def options_of(self, number: int) -> dict[str, Any]:
        """Those of a prompt's answer number 0, 1, …: a seed belongs to the first, and those after it to the others."""
        seed = self.options.get("seed")
        return self.options if not number or seed is None else {**self.options, "seed": seed + number}


def read_call(body: Any, chat: bool, most_tokens: int) -> Call:
    """Check a request's JSON. most_tokens: that a text may have; a chat that names no limit has as many.

    Raises `ParameterError`s that name the field.
    """
    if not isinstance(body, dict):
        raise ParameterError("the request must be a JSON object")
    asked = {name: value for name, value in body.items() if value is not None}
    _refuse_what_is_not_served(asked, (*_SAMPLING, *_OWN, *(_OF_CHATS if chat else _OF_COMPLETIONS)))
    options = {name: asked[name] for name in _SAMPLING if name in asked}
    options.setdefault("temperature", 1.0)  # OpenAI's, and that of all its clients
    check_kinds(options)
    options["max_new_tokens"] = _limit(asked, chat, most_tokens)
    biases = read_biases(asked.get("logit_bias"))
    if biases:
        options["logit_bias"] = biases
    _read_penalty(asked, options)
    top = _read_logprobs(asked, chat)
    if top is not None:
        options |= {"logprobs": True, "top_logprobs": top}
    call = Call(
        _messages(asked) if chat else _prompts(asked),
        options,
        _structured(asked),
        _text(asked, "model"),
        _count(asked, "n"),
        check_switch("stream", asked.get("stream")),
        _usage(asked),
        top,
        check_switch("return_token_ids", asked.get("return_token_ids")),
    )
    if call.texts > MOST_TEXTS:
        raise ParameterError(
            f"a request may ask for {MOST_TEXTS} texts at most, got {call.texts}: ask for fewer prompts or n"
        )
    return call


def _refuse_what_is_not_served(asked: Mapping[str, Any], served: tuple[str, ...]) -> None:
    for name, value in asked.items():
        off = _OFF.get(name, ())
        if name in served or name in _ABOUT_OTHER_THINGS or any(value == one and type(value) is type(one) for one in off):
            continue
        if name == "best_of" and value == asked.get("n", 1):
            continue
        how = f"give {off[0]!r}, or leave it out" if off else "leave it out"
        raise NotServedError(f"{name} is not served, got {value!r:.60}: {how}", name)


def _limit(asked: Mapping[str, Any], chat: bool, most: int) -> int:
    name = "max_completion_tokens" if chat and "max_completion_tokens" in asked else "max_tokens"
    limit = asked.get(name, most if chat else min(_LEGACY_TOKENS, most))
    check_count(name, limit, 1, most, "start the server with a larger max_new_tokens for longer texts")
    return int(limit)


def _read_penalty(asked: Mapping[str, Any], options: dict[str, Any]) -> None:
    """llama.cpp's names of the repetition penalty, which looks back over some tokens there and over the whole text here."""
    if "repeat_penalty" in asked:
        value = asked["repeat_penalty"]
        if value != options.setdefault("repetition_penalty", value):
            raise NotServedError(
                f"repeat_penalty must be repetition_penalty, {options['repetition_penalty']!r}, got {value!r}: drop one",
                "repeat_penalty",
            )
    if asked.get("repeat_last_n", -1) != -1 and options.get("repetition_penalty", 1.0) != 1.0:
        raise NotServedError("repeat_last_n must be -1, the whole text", "repeat_last_n")


def _read_logprobs(asked: Mapping[str, Any], chat: bool) -> int | None:
    """How many tokens are told beside each, None if not even the tokens' own are wanted."""
    value = asked.get("logprobs", False)
    if chat:
        wanted, top = check_switch("logprobs", value), asked.get("top_logprobs", 0)
        if not wanted and top:
            raise ParameterError("top_logprobs belongs to logprobs: give logprobs true")
        name = "top_logprobs"
    else:
        wanted, top, name = value is not False, value, "logprobs"
    if not wanted:
        return None
    check_count(name, top, 0, MOST_TOP)
    return int(top)


def _structured(asked: Mapping[str, Any]) -> tuple[Structured, ...]:
    """OpenAI's `response_format`, and vLLM's `structured_outputs`."""
    found = [*_response_format(asked.get("response_format"))]
    outputs = asked.get("structured_outputs", {})
    kinds: dict[str, tuple[str, Callable[[Any], str | None]]] = {
        "json": ("json_schema", read_schema),
        "regex": ("regex", read_regex),
        "grammar": ("grammar", partial(read_regex, name="grammar")),
    }
    if not isinstance(outputs, dict) or any(name not in kinds for name, value in outputs.items() if value is not None):
        raise NotServedError(
            f"structured_outputs must be an object with any of {', '.join(kinds)}, got {outputs!r:.80}", "structured_outputs"
        )
    for name, (kind, read) in kinds.items():
        text = read(outputs.get(name))
        if text is not None:
            found.append(Structured(kind, text))
    return tuple(found)


def _response_format(wanted: Any) -> list[Structured]:
    kind = wanted.get("type") if isinstance(wanted, dict) else "text" if wanted is None else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [Structured("json_schema", '{"type": "object"}')]
    given = wanted.get("json_schema") if kind == "json_schema" else None
    schema = read_schema(given.get("schema")) if isinstance(given, dict) else None
    if schema is None:
        raise NotServedError(
            'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
            f'{{"schema": …}}}}, got {wanted!r:.80}',
            "response_format",
        )
    return [Structured("json_schema", schema)]


def _usage(asked: Mapping[str, Any]) -> bool:
    options = asked.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise NotServedError(f"stream_options may hold include_usage, got {options!r:.80}", "stream_options")
    return check_switch("include_usage", options.get("include_usage"))


def _prompts(asked: Mapping[str, Any]) -> list[Any]:
    """A text, token ids, or a list of either."""
    prompt = asked.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not any(is_token(one) for one in prompt)
    return [read_prompt(one) for one in (prompt if several and isinstance(prompt, list) else [prompt])]


def _messages(asked: Mapping[str, Any]) -> list[Any]:
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise ParameterError('messages must be a list of objects such as {"role": "user", "content": "…"}, not empty')
    return [messages]


def _text(asked: Mapping[str, Any], name: str) -> str | None:
    value = asked.get(name)
    if not isinstance(value, str | None):
        raise ParameterError(f"{name} must be a string, got {value!r}")
    return value


def _count(asked: Mapping[str, Any], name: str) -> int:
    value = asked.get(name, 1)
    check_count(name, value, 1, MOST_TEXTS)
    return int(value)
