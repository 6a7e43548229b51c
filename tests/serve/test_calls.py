"""What requests may ask for, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import ParameterError
from outrider.serve.calls import Call, Structured, read_call

SAID = [{"role": "user", "content": "hello"}]


def completion(**body: Any) -> Call:
    return read_call({"prompt": "abc", **body}, chat=False, most_tokens=100)


def chat(**body: Any) -> Call:
    return read_call({"messages": SAID, **body}, chat=True, most_tokens=100)


def test_what_is_not_said_is_as_openai_has_it() -> None:
    assert completion().options == {"temperature": 1.0, "max_new_tokens": 16}
    assert chat().options["max_new_tokens"] == 100
    assert (chat().count, chat().stream, chat().top, chat().model) == (1, False, None, None)


def test_settings_are_handed_on() -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 0.2}
    given |= {"frequency_penalty": -0.5, "repetition_penalty": 1.2, "stop": ["a", "b"], "seed": 7, "ignore_eos": True}
    given |= {"drafter_invariant": True}
    found = completion(**given, max_tokens=9, logit_bias={"3": -2, "4": 1.5}).options
    assert found == {**given, "max_new_tokens": 9, "logit_bias": {3: -2.0, 4: 1.5}}
    assert chat(max_completion_tokens=5, max_tokens=7).options["max_new_tokens"] == 5


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("abc", ["abc"]),
        ([3, 4], [[3, 4]]),
        (["abc", "d"], ["abc", "d"]),
        ([[3, 4], [5]], [[3, 4], [5]]),
    ],
)
def test_prompts(prompt: Any, found: list[Any]) -> None:
    assert read_call({"prompt": prompt}, chat=False, most_tokens=9).prompts == found


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [3, "a"], ["a", 3], [True], 3, None, {"a": 1}])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(ParameterError, match="prompt must be"):
        read_call({"prompt": prompt}, chat=False, most_tokens=9)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"echo": True}, "echo is not served, got True: give False, or leave it out"),
        ({"best_of": 2}, "best_of is not served"),
        ({"suffix": "x"}, "suffix is not served"),
        ({"min_tokens": 2}, "min_tokens is not served"),
        ({"tempreature": 1}, "tempreature is not served, got 1: leave it out"),
        ({"tools": [{}]}, "tools is not served"),
        ({"messages": SAID}, "messages is not served"),
        ({"max_tokens": 101}, "max_tokens must be a whole number in 1 … 100, got 101: start the server"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_tokens": True}, "max_tokens must be"),
        ({"n": 0}, "n must be a whole number in 1 … 128, got 0"),
        ({"n": 100, "prompt": ["a", "b"]}, "128 texts at most, got 200"),
        ({"seed": True}, "seed must be"),
        ({"seed": "1"}, "seed must be"),
        ({"stop": 3}, "stop must be"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"logprobs": 21}, "logprobs must be a whole number in 0 … 20, got 21"),
        ({"logprobs": True}, "logprobs must be a whole number"),
        ({"logit_bias": {"a": 1}}, "logit_bias must be"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty must be repetition_penalty"),
        ({"repeat_penalty": 1.2, "repeat_last_n": 64}, "repeat_last_n must be -1"),
        ({"response_format": {"type": "xml"}}, "response_format must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format must be"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "json_schema must be"),
        ({"structured_outputs": {"grammar": 3}}, "grammar must be a string or null, got 3"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs must be an object with any of"),
        ({"stream_options": {"every": 3}}, "stream_options may hold include_usage"),
        ({"model": 3}, "model must be a string"),
    ],
)
def test_what_is_refused(body: dict[str, Any], names: str) -> None:
    with pytest.raises(ParameterError, match=names.replace("(", r"\(").replace("[", r"\[")):
        completion(**body)


@pytest.mark.parametrize("body", [3, [], "a", None])
def test_what_is_no_request(body: Any) -> None:
    with pytest.raises(ParameterError, match="must be a JSON object"):
        read_call(body, chat=False, most_tokens=9)


@pytest.mark.parametrize("messages", [None, [], "hello", ["hello"], [3]])
def test_what_is_no_chat(messages: Any) -> None:
    with pytest.raises(ParameterError, match="messages must be a list"):
        chat(messages=messages)


@pytest.mark.parametrize(
    "body",
    [
        {"echo": False, "best_of": 1, "suffix": "", "min_tokens": 0, "use_beam_search": False, "length_penalty": 1},
        {"best_of": 3, "n": 3},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"suffix": None, "echo": None, "whatever": None, "seed": None, "stop": None, "temperature": None, "logprobs": None},
        {"repeat_last_n": 64},
    ],
)
def test_what_asks_for_nothing_is_taken(body: dict[str, Any]) -> None:
    found = completion(**body)
    assert found.options == completion(n=body.get("n")).options


def test_log_probabilities_of_completions_and_chats() -> None:
    assert completion(logprobs=False).top is None
    assert completion(logprobs=0).top == 0
    assert completion(logprobs=3).options["top_logprobs"] == 3
    assert chat(logprobs=True).top == 0
    assert chat(logprobs=True, top_logprobs=2).top == 2
    with pytest.raises(ParameterError, match="top_logprobs belongs to logprobs"):
        chat(top_logprobs=2)
    with pytest.raises(ParameterError, match="logprobs must be true or false"):
        chat(logprobs=3)


def test_structures() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    assert chat(response_format=schema).structured == (Structured("json_schema", '{"type": "integer"}'),)
    assert chat(response_format={"type": "json_object"}).structured == (Structured("json_schema", '{"type": "object"}'),)
    assert chat(response_format={"type": "text"}).structured == ()
    outputs = {"regex": "a+", "grammar": None, "json": {"type": "null"}}
    found = chat(structured_outputs=outputs).structured
    assert found == (Structured("json_schema", '{"type": "null"}'), Structured("regex", "a+"))


def test_further_answers_have_the_seeds_after_the_first() -> None:
    call = completion(n=3, seed=5)
    assert [call.options_of(i)["seed"] for i in range(3)] == [5, 6, 7]
    assert "seed" not in completion(n=2).options_of(1)
