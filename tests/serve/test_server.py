"""The server over real HTTP, by OpenAI's own client: texts, streams, errors, and clients that leave."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest
import requests

import outrider
from outrider.models.base import TextModel
from tests.helpers.serving import Served, serving

PROMPT = "the quick brown fox"
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12}
LONG: dict[str, Any] = {"max_tokens": 5000, "extra_body": {"ignore_eos": True}}


def alone(target: TextModel, prompt: Any = PROMPT, **options: Any) -> outrider.Result:
    given: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_new_tokens": 12, **options}
    result: outrider.Result = outrider.generate(target, prompt, draft="suffix", num_draft_tokens=2, **given)
    return result


def test_a_completion_is_what_generate_writes(target: TextModel, served: Served) -> None:
    found = served.client.completions.create(model="tiny", prompt="a b a b a b", **WARM)
    want = alone(target, "a b a b a b")
    assert found.choices[0].text == want.text
    assert found.choices[0].finish_reason == {"length": "length", "eos": "stop"}[want.finish_reason]
    assert found.object == "text_completion"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (want.prompt_tokens, len(want.tokens))
    assert found.usage.total_tokens == want.prompt_tokens + len(want.tokens)
    details = found.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == want.stats.accepted
    assert details.rejected_prediction_tokens == want.stats.drafted - want.stats.accepted
    assert want.stats.drafted  # so that these say something


def test_several_prompts_and_several_answers_to_each(target: TextModel, served: Served) -> None:
    ids = target.tokenizer.encode(PROMPT)
    body = {"prompt": [ids, [5, 6, 7]], "n": 2, "temperature": 1.0, "seed": 4, "max_tokens": 6, "return_token_ids": True}
    found = served.post("completions", body).json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    want = [alone(target, p, seed=s, temperature=1.0, max_new_tokens=6) for p in (PROMPT, [5, 6, 7]) for s in (4, 5)]
    assert [choice["token_ids"] for choice in found["choices"]] == [one.tokens for one in want]
    assert [choice["prompt_token_ids"] for choice in found["choices"]] == [ids, ids, [5, 6, 7], [5, 6, 7]]
    assert found["usage"]["prompt_tokens"] == len(ids) + 3  # once each


def test_a_chat_is_what_generate_writes(target: TextModel, served: Served) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    found = served.client.chat.completions.create(model="models/tiny", messages=messages, **WARM)  # type: ignore[arg-type]
    want = alone(target, messages)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", want.text)
    assert found.object == "chat.completion"
    assert found.model == "tiny"
    assert want.text


@pytest.mark.parametrize("chat", [False, True])
def test_pieces_of_a_stream_add_up_to_the_text(target: TextModel, served: Served, chat: bool) -> None:
    texts = ["", ""]
    ends: list[str | None] = [None, None]
    options: dict[str, Any] = {**WARM, "n": 2, "stream": True, "stream_options": {"include_usage": True}, "model": "tiny"}
    said = [{"role": "user", "content": "hello"}]
    create: Any = served.client.chat.completions.create if chat else served.client.completions.create
    chunks = list(create(**options, **({"messages": said} if chat else {"prompt": PROMPT})))
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        piece = choice.delta.content if chat else choice.text
        assert ends[choice.index] is None  # nothing comes after the end
        texts[choice.index] += piece or ""
        ends[choice.index] = choice.finish_reason
    want = [alone(target, said if chat else PROMPT, seed=seed) for seed in (3, 4)]
    assert texts == [one.text for one in want]
    assert None not in ends
    assert len(chunks) > 8  # piece by piece
    assert len({chunk.id for chunk in chunks}) == 1
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage.completion_tokens == sum(len(one.tokens) for one in want)
    assert usage.prompt_tokens == want[0].prompt_tokens


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_tells_of_its_tokens_what_a_whole_answer_does(served: Served, chat: bool) -> None:
    """Which starts with characters that are several tokens."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "🙂"}]} if chat else {"prompt": "🙂"}
    asked |= {"max_tokens": 30, "seed": 2, "n": 2, "return_token_ids": True, "stop": ["zq"]}
    asked |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    path = "chat/completions" if chat else "completions"
    whole = served.post(path, asked).json()["choices"]
    parts: list[list[dict[str, Any]]] = [[], []]
    for line in served.post(path, {**asked, "stream": True}).text.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            parts[choice["index"]].append(choice)
    for made, wanted in zip(parts, whole, strict=True):
        assert made[0]["prompt_token_ids"] == wanted["prompt_token_ids"]
        assert [token for part in made for token in part["token_ids"]] == wanted["token_ids"]
        told = [part["logprobs"] for part in made if part["logprobs"]]
        assert len(told) > 5
        for field in wanted["logprobs"].keys() - {"refusal"}:
            assert [one for part in told for one in part[field]] == wanted["logprobs"][field]


def test_a_stream_begins_with_the_role_and_ends_with_done(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": True}
    answer = served.post("chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert json.loads(lines[0])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["choices"][0]["finish_reason"] in ("length", "stop")


def test_log_probabilities(target: TextModel, served: Served) -> None:
    options: dict[str, Any] = {**WARM, "max_tokens": 5, "model": "tiny"}
    want = alone(target, max_new_tokens=5, top_logprobs=3)
    assert want.logprobs is not None
    assert want.top_logprobs is not None
    told = served.client.completions.create(prompt=PROMPT, logprobs=3, **options).choices[0].logprobs
    assert told is not None
    assert told.token_logprobs == pytest.approx(want.logprobs, abs=1e-5)
    for token, text in zip(want.tokens, told.tokens or (), strict=True):
        decoded = target.tokenizer.decode([token])
        assert text == (target.tokenizer.convert_ids_to_tokens(token) if "\ufffd" in decoded else decoded)
    offsets = told.text_offset or []
    assert offsets[0] == 0
    assert sorted(offsets) == offsets
    assert offsets[-1] <= len(want.text)
    assert told.top_logprobs is not None
    for top, wanted in zip(told.top_logprobs, want.top_logprobs, strict=True):
        assert sorted(top.values()) == pytest.approx(sorted(p for _, p in wanted), abs=1e-5)
    said = [{"role": "user", "content": "hello"}]
    create: Any = served.client.chat.completions.create
    chat = create(messages=said, logprobs=True, top_logprobs=2, **options)
    found = chat.choices[0].logprobs.content
    other = alone(target, said, max_new_tokens=5, top_logprobs=2)
    assert [one.logprob for one in found] == pytest.approx(other.logprobs, abs=1e-5)
    assert [[p.logprob for p in one.top_logprobs] for one in found] == [
        pytest.approx([p for _, p in top], abs=1e-5) for top in other.top_logprobs or ()
    ]
    assert all(one.bytes is None or bytes(one.bytes).decode() == one.token for one in found)
    bare = served.client.completions.create(prompt=PROMPT, logprobs=0, **options).choices[0].logprobs
    assert bare is not None
    assert bare.top_logprobs is None


def test_answers_follow_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    said: Any = [{"role": "user", "content": "hello"}]
    for seed in (1, 2):
        found = served.client.chat.completions.create(
            model="tiny", messages=said, response_format=wanted, seed=seed, max_tokens=64
        )
        assert json.loads(found.choices[0].message.content or "").keys() == {"a"}
    one = served.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, extra_body={"structured_outputs": {"regex": "yes|no"}}
    )
    assert one.choices[0].text in ("yes", "no")
    assert len(served.service._constraints) == 2  # each made once
    bad = {"prompt": PROMPT, "structured_outputs": {"regex": "("}}
    assert served.post("completions", bad).status_code == 400


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"prompt": PROMPT, "temperature": -1}, "temperature must be", None),
        ({"prompt": PROMPT, "echo": True}, "echo is not served", "echo"),
        ({"prompt": PROMPT, "logit_bias": {"99999": 1}}, "logit_bias", None),
        ({"prompt": [99999]}, "token", None),
        ({"prompt": "a\ud800"}, "prompt must be Unicode", None),
        ({}, "prompt must be", None),
    ],
)
def test_bad_requests(served: Served, body: dict[str, Any], message: str, param: str | None) -> None:
    answer = served.post("completions", body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    with pytest.raises(openai.BadRequestError):
        served.client.completions.create(model="tiny", prompt="", max_tokens=2)


def test_other_errors_have_their_own_status(served: Served) -> None:
    for data in (b"{", b"\xff", b"[" * 100_000):
        assert requests.post(f"{served.url}/v1/completions", data=data, timeout=60).status_code == 400
    for prompt in ([5] * 9000, "word " * 2_000_000):  # of the second one no token is counted
        long = served.post("completions", {"prompt": prompt})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "10000000 characters" in long.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served: name 'tiny'"):
        served.client.completions.create(model="other", prompt=PROMPT)
    assert requests.get(f"{served.url}/v1/nothing", timeout=60).json()["error"]["type"] == "invalid_request_error"
    assert requests.get(f"{served.url}/v1/completions", timeout=60).status_code == 405


def test_pages_in_browsers_may_ask_if_they_are_named(target: TextModel, served: Served) -> None:
    wants = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    wants["Access-Control-Request-Headers"] = "authorization,content-type"

    def allowed(url: str, **how: Any) -> str | None:
        asked = requests.options(f"{url}/v1/chat/completions", headers={**wants, **how}, timeout=60)
        found: str | None = asked.headers.get("Access-Control-Allow-Origin")
        return found

    assert allowed(served.url) is None
    with serving(target, draft=None, key="secret", origins=["http://page"]) as other:
        assert allowed(other.url) == "http://page"
        assert allowed(other.url, Origin="http://elsewhere") is None
        headers = {"Origin": "http://page", "Authorization": "Bearer secret"}
        answer = other.post("completions", {"prompt": PROMPT, "max_tokens": 2}, headers=headers)
        assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, "http://page")


def test_what_there_is(served: Served) -> None:
    assert [one.id for one in served.client.models.list()] == ["tiny", "models/tiny"]
    assert served.client.models.retrieve("models/tiny").id == "models/tiny"
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served"):
        served.client.models.retrieve("other")
    assert requests.get(f"{served.url}/health", timeout=60).status_code == 200
    before = figures(served)
    served.client.completions.create(model="tiny", prompt=PROMPT, **WARM)
    served.post("completions", {"prompt": ""})
    after = figures(served)
    gained = {name: after[name] - before[name] for name in after}
    assert (gained["texts_total"], gained["refused_total"], gained["load"]) == (1, 1, 0)
    assert 1 <= gained["generated_tokens_total"] <= 12
    assert gained["accepted_tokens_total"] <= gained["tested_tokens_total"] <= gained["drafted_tokens_total"]


def figures(served: Served) -> dict[str, float]:
    text = requests.get(f"{served.url}/metrics", timeout=60).text
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("outrider_"): float(value) for name, value in rows}


def test_who_has_no_key_has_no_answer(target: TextModel) -> None:
    with serving(target, key="secret", draft=None) as served:
        assert served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2).choices
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            answer = served.post("completions", {"prompt": PROMPT}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert requests.get(f"{served.url}/v1/models", timeout=60).status_code == 401
        assert requests.get(f"{served.url}/health", timeout=60).status_code == 200


def test_clients_that_leave_take_no_places(target: TextModel) -> None:
    with serving(target, size=2, most_tokens=5000) as served:
        stream = served.client.completions.create(model="tiny", prompt=PROMPT, stream=True, n=2, **LONG)
        assert [next(iter(stream)) for _ in range(5)]
        served.wait_for(2)
        stream.close()
        served.wait_for(0)
        with pytest.raises(openai.APITimeoutError):
            served.client.with_options(timeout=1).completions.create(model="tiny", prompt=PROMPT, **LONG)
        served.wait_for(0)
        assert served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2).choices


def test_clients_are_told_when_the_server_ends_before_their_text(target: TextModel) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 5000, "ignore_eos": True}
    with serving(target, most_tokens=5000, grace=0.5) as served:
        stream = served.post("completions", {**asked, "stream": True}, stream=True)
        answers: list[requests.Response] = []
        other = threading.Thread(target=lambda: answers.append(served.post("completions", asked)))
        other.start()
        served.wait_for(2)
        served.server.should_exit = True
        lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
        other.join(60)
    assert "the server ends" in json.loads(lines[-2])["error"]["message"]
    assert lines[-1] == "[DONE]"
    assert (answers[0].status_code, answers[0].json()["error"]["type"]) == (503, "server_error")


def test_more_than_may_wait_are_told_to_come_again(target: TextModel) -> None:
    with serving(target, size=1, most_waiting=1, most_tokens=5000) as served:
        streams = [served.client.completions.create(model="tiny", prompt=PROMPT, stream=True, **LONG) for _ in range(2)]
        served.wait_for(2)
        with pytest.raises(openai.RateLimitError, match="try again later"):
            served.client.completions.create(model="tiny", prompt=PROMPT)
        answer = served.post("completions", {"prompt": PROMPT})
        assert answer.headers["retry-after"]
        for stream in streams:
            stream.close()
        served.wait_for(0)


def test_many_clients_side_by_side(target: TextModel, served: Served) -> None:
    found: dict[int, str] = {}

    def ask(seed: int) -> None:
        found[seed] = served.client.completions.create(model="tiny", prompt=PROMPT, **{**WARM, "seed": seed}).choices[0].text

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {seed: alone(target, seed=seed).text for seed in range(10)}
    assert len(set(found.values())) > 5


def test_a_request_that_fails_later_says_so(target: TextModel) -> None:
    """A row without a law: every token is excluded."""
    none = {str(token): float("-inf") for token in range(target.vocab_size)}
    body = json.dumps({"prompt": PROMPT, "logit_bias": none, "max_tokens": 4})
    with serving(target) as served:
        url = f"{served.url}/v1/completions"
        answer = requests.post(url, data=body, timeout=60)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        stream = requests.post(url, data=body.replace('"max_tokens"', '"stream": true, "max_tokens"'), timeout=60)
        lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
        assert "error" in json.loads(lines[-2])
        assert served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2).choices
        served.service.batch.close()
        assert requests.get(f"{served.url}/health", timeout=60).status_code == 503


def test_bytes_of_a_character_are_told_apart(target: TextModel, served: Served) -> None:
    """Several tokens that are one character: each piece of a stream is whole characters."""
    ids = target.tokenizer.encode("🙂")
    assert len(ids) > 1
    bias = {str(token): 100.0 for token in ids}
    create: Any = served.client.completions.create
    chunks = create(model="tiny", prompt="🙂", max_tokens=20, temperature=1.0, seed=1, stream=True, logit_bias=bias)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    want = alone(target, "🙂", seed=1, temperature=1.0, max_new_tokens=20, logit_bias=dict.fromkeys(ids, 100.0))
    assert text == want.text
    assert "🙂" in text or "\ufffd" in text
