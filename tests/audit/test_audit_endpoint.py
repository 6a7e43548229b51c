"""Another engine's server audited: whatever of OpenAI's answers it gives, and one line for any other."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from outrider.audit.endpoint import endpoint_texts
from outrider.audit.verdict import EXACT
from outrider.decode import Request, decode
from outrider.draft_length import FixedLength
from outrider.endpoint import EndpointError, request_body
from outrider.errors import ParameterError
from outrider.randomness import RandomStream
from outrider.sampling import SamplingSettings
from tests.helpers.audit_texts import ONE, V, draft_model, report, target_model
from tests.helpers.openai_server import Server


class Tokenizer:
    eos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [1 + len(text) % 5, 2]

    def decode(self, tokens: list[int]) -> str:
        return "".join("\ufffd" if token == 7 else "t" for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(V)}


def text_model() -> Any:
    model: Any = target_model()
    model.tokenizer = Tokenizer()
    model.end_tokens = frozenset({0})
    return model


def test_every_setting_is_sent_and_what_cannot_be_is_refused() -> None:
    settings = {field.name: getattr(ONE, field.name) for field in fields(ONE)}
    body = request_body([1], replace(ONE, repetition_penalty=1.5, logit_bias={3: -2.0}), 5, 0)
    assert body["repetition_penalty"] == body["repeat_penalty"] == 1.5
    assert body["logit_bias"] == {"3": -2.0}
    assert {*settings} - {"processors"} <= {*body}
    assert "logit_bias" not in request_body([1], ONE, 5, 0)
    with pytest.raises(ParameterError, match="processors can't be sent to a server"):
        request_body([1], replace(ONE, processors=(lambda tokens, logits: logits,)), 5, 0)
    with pytest.raises(ParameterError, match="logit_bias of -inf can't be sent"):
        request_body([1], replace(ONE, logit_bias={3: -math.inf}), 5, 0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["token_ids", "tokens", "content", "spelled"])
def test_a_server_is_audited(form: str) -> None:
    """The server samples from the very law; whether it names the end of a text or not."""
    model = text_model()

    def answer(body: dict[str, Any]) -> tuple[int, bytes]:
        assert body["temperature"] == 1.0
        stream = RandomStream(body["seed"])
        new, _ = decode(
            target_model(), [Request(body["prompt"], 60, stream, frozenset({0}))], ONE, draft_model(), FixedLength(2)
        )
        tokens = new[0]
        ended = tokens[-1] == 0
        if form in ("tokens", "content") and ended:
            tokens = tokens[:-1]
        choice: dict[str, Any] = {"text": "x", "finish_reason": "stop" if ended else "length"}
        if form == "content":
            choice["logprobs"] = {"content": [{"id": token} for token in tokens]}
        elif form == "spelled":
            choice["logprobs"] = {"tokens": [f"t{token}" for token in tokens]}
        else:
            choice[form] = tokens
        return 200, json.dumps({"choices": [choice]}).encode()

    with Server(answer) as server:
        texts = list(endpoint_texts(server.url, model, ONE, 3000))
    assert len({body["seed"] for body in server.asked}) == len(server.asked)
    assert any(text.tokens[-1] == 0 for text in texts)
    found = report(texts, target_model(), None, ONE)
    assert found.verdict == EXACT, found.reason


@pytest.mark.parametrize(
    ("code", "content", "said"),
    [
        (500, b"oh", "HTTPError: 'oh'"),
        (200, b"oh", "gave no answer|did not answer in JSON"),
        (200, b"[]", "is it OpenAI's completions"),
        (200, b"{}", "no answer of OpenAI's completions"),
        (200, b'{"choices": [null]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"token_ids": 5}]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"token_ids": [true]}]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"logprobs": {"content": "abc"}}]}', "no answer of OpenAI's completions"),
        (200, b'{"choices": [{"token_ids": [9999]}]}', "gave token 9999"),
        (200, b'{"choices": [{"text": "hello"}]}', "text without token ids"),
        (200, b'{"choices": [{"logprobs": {"tokens": ["hello"]}}]}', "spells tokens otherwise"),
        (200, b'{"choices": [{"text": ""}]}', "8 times in a row without a token"),
    ],
)
def test_a_server_that_answers_otherwise_gets_one_line(code: int, content: bytes, said: str) -> None:
    with Server(lambda body: (code, content)) as server, pytest.raises(EndpointError, match=said):
        list(endpoint_texts(server.url, text_model(), ONE, 10))


def test_tokens_that_a_server_leaves_out_are_not_passed_over() -> None:
    """llama.cpp's server names one token of several that make a character: the text is cut there."""

    def answer(tokens: list[int], told: int) -> tuple[int, bytes]:
        content = [{"id": token} for token in tokens]
        choice = {"text": "x", "finish_reason": "length", "logprobs": {"content": content}}
        return 200, json.dumps({"choices": [choice], "usage": {"completion_tokens": told}}).encode()

    with Server(lambda body: answer([4, 5, 7, 6], 5)) as server:
        (text,) = endpoint_texts(server.url, text_model(), ONE, 2)
    assert text.new == (4, 5)
    with (
        Server(lambda body: answer([4, 5, 6], 5)) as server,
        pytest.raises(EndpointError, match="made 5 tokens and named 3"),
    ):
        list(endpoint_texts(server.url, text_model(), ONE, 2))


def test_at_temperature_0_each_prompt_is_asked_once() -> None:
    """Again it would be the same text, and no further sample."""
    body = json.dumps({"choices": [{"text": "x", "finish_reason": "length", "token_ids": [3, 4, 5]}]}).encode()
    with Server(lambda _: (200, body)) as server:
        texts = list(endpoint_texts(server.url, text_model(), SamplingSettings(), 3000, prompts=["a", "bb", "ccc"]))
    assert len(texts) == len(server.asked) == 3
