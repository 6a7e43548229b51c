"""Texts from a server that speaks OpenAI's completions: any engine, live.

The answer must name token ids, as vLLM (`return_token_ids`), llama.cpp (ids in `logprobs.content`) and others do, or
token strings in `logprobs.tokens`, which are then looked up in the target's vocabulary. Every sampling setting is sent,
those that are off as well, since servers have defaults of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.audit.sampled import Text
from outrider.audit.sources import PROMPTS, TOKENS_PER_TEXT
from outrider.errors import OutriderError, ParameterError
from outrider.models.base import TextModel
from outrider.sampling import SamplingSettings

SECONDS = 600.0


class EndpointError(OutriderError):
    """The server can't be reached, or its answer can't be used."""


def endpoint_texts(
    url: str,
    target: TextModel,
    sampling: SamplingSettings,
    tokens: int,
    extra: dict[str, Any] | None = None,
    prompts: Sequence[str] = PROMPTS,
    seed: int = 0,
    done: int = 0,
) -> Iterator[Text]:
    """Completions of `prompts` in turn, each with a seed of its own, until they hold `tokens` new tokens or more.

    url: with the version, http://localhost:8080/v1. extra: further fields of the requests. done: texts made before.
    """
    made = 0
    while made < tokens:
        ids = [int(token) for token in target.tokenizer.encode(prompts[done % len(prompts)])]
        body = {**request_body(ids, sampling, seed + done), **(extra or {})}
        new = _token_ids(post(f"{url.rstrip('/')}/completions", body), target)
        done += 1
        if new:  # a text may end before it begins
            made += len(new)
            yield Text((*ids, *new), len(ids))


def request_body(prompt: list[int], sampling: SamplingSettings, seed: int) -> dict[str, Any]:
    """What is sent: the settings in the names of OpenAI, llama.cpp and vLLM."""
    return {
        "prompt": prompt,
        "max_tokens": TOKENS_PER_TEXT,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens": True,
        "ignore_eos": True,
    }


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer to a request."""
    import requests

    try:
        response = requests.post(url, json=body, timeout=SECONDS)
        response.raise_for_status()
        found = response.json()
    except requests.RequestException as error:
        answer = getattr(error, "response", None)
        said = f": {answer.text[:120]!r}" if answer is not None and answer.text else ""
        raise EndpointError(f"endpoint {url} gave no answer ({type(error).__name__}{said}): check the address") from None
    except json.JSONDecodeError:
        raise EndpointError(f"endpoint {url} did not answer in JSON: check the address") from None
    if not isinstance(found, dict) or not found.get("choices"):
        raise EndpointError(f"endpoint {url} gave no choices, but {str(found)[:120]!r}: is it OpenAI's completions?")
    return found


def _token_ids(answer: dict[str, Any], target: TextModel) -> list[int]:
    """The ids of the generated tokens, in whichever way the server tells them."""
    choice = answer["choices"][0]
    logprobs = choice.get("logprobs") or {}
    content = logprobs.get("content") or []
    for found in (choice.get("token_ids"), choice.get("tokens"), answer.get("tokens"), [c.get("id") for c in content]):
        if found and all(isinstance(token, int) for token in found):
            return [int(token) for token in found]
    spelled = logprobs.get("tokens")
    if spelled:
        known = target.tokenizer.get_vocab()
        if all(token in known for token in spelled):
            return [int(known[token]) for token in spelled]
        raise EndpointError("endpoint spells tokens otherwise than the target's vocabulary: have it return token ids")
    if not choice.get("text"):
        return []
    raise EndpointError(
        "endpoint returned text without token ids, from which its law can't be told: use a server that returns ids "
        "(vLLM: return_token_ids; llama.cpp: logprobs), or --extra with the field that makes it"
    )


def parse_extra(text: str | None) -> dict[str, Any]:
    """The further fields as JSON."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ParameterError(f"extra must be a JSON object, got {text!r}")
    return found
