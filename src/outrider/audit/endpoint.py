"""Texts from a server that speaks OpenAI's completions: any engine, live.

The answer must name token ids, as vLLM (`return_token_ids`), llama.cpp (ids in `logprobs.content`) and others do, or
token strings in `logprobs.tokens`, which are then looked up in the target's vocabulary.

Texts may end. An end that the server keeps to itself (it says that it stopped, and names no such token) is put back as the
tokenizer's end-of-sequence token, without which the sample would be one of texts that go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.audit.inputs import PROMPTS
from outrider.audit.sources import TOKENS_PER_TEXT, text_seed, token_ids
from outrider.audit.text import Text
from outrider.endpoint import EndpointError, post, request_body
from outrider.models.base import TextModel, refuse_encoder
from outrider.request.prompts import Prompt, encode
from outrider.sampling import SamplingSettings

MOST_EMPTY = 8  # answers in a row
NAME_TOKENS = {"logprobs": 1, "return_token_ids": True, "return_tokens": True}  # as llama.cpp, vLLM and others have it


def endpoint_texts(
    url: str,
    target: TextModel,
    sampling: SamplingSettings,
    tokens: int,
    extra: dict[str, Any] | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    seed: int = 0,
    done: int = 0,
) -> Iterator[Text]:
    """Completions of `prompts` in turn, each with a seed of its own, until they hold `tokens` new tokens or more.

    At temperature 0 each prompt once: again it would be the same text.

    url: with the version, http://localhost:8080/v1. extra: further fields of the requests. done: texts made before.
    """
    refuse_encoder(target, "an audit of a server")
    made = empty = 0
    while made < tokens and not (sampling.greedy and done >= len(prompts)):
        ids = encode(target, prompts[done % len(prompts)])
        body = {
            **request_body(ids, sampling, TOKENS_PER_TEXT, text_seed(seed, done) % 2**31),
            **NAME_TOKENS,
            **(extra or {}),
        }
        new = _generated(post(f"{url.rstrip('/')}/completions", body), target)
        done += 1
        empty = 0 if new else empty + 1
        if empty == MOST_EMPTY:
            raise EndpointError(f"endpoint {url} answered {empty} times in a row without a token: check its settings")
        if new:
            made += len(new)
            yield Text((*ids, *new), len(ids))


def _generated(answer: dict[str, Any], target: TextModel) -> list[int]:
    """The generated tokens of an answer, an end of the text among them."""
    try:
        choice = answer["choices"][0]
        new = _token_ids(choice, answer, target)
        ended = choice.get("finish_reason") == "stop"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise EndpointError(f"endpoint gave {str(answer)[:120]!r}, which is no answer of OpenAI's completions") from None
    wrong = [token for token in new if not 0 <= token < target.vocab_size]
    if wrong:
        raise EndpointError(f"endpoint gave token {wrong[0]}, {target.name} has {target.vocab_size}: another model?")
    told = (answer.get("usage") or {}).get("completion_tokens")
    if isinstance(told, int) and told > len(new) + ended:
        return _before_what_is_missing(new, told, target)
    end = target.tokenizer.eos_token_id
    if ended and end is not None and not (new and new[-1] in {end, *target.end_tokens}):
        new = [*new, int(end)]
    return new


def _before_what_is_missing(new: list[int], told: int, target: TextModel) -> list[int]:
    """The tokens before the first piece of a character: llama.cpp's server leaves tokens out that complete one.

    Cutting there leaves such tokens out of the sample, about one in a thousand of English text, which is too few to show.
    """
    pieces = (i for i, token in enumerate(new) if "\ufffd" in target.tokenizer.decode([token]))
    first = next(pieces, None)
    if first is None:
        raise EndpointError(f"endpoint made {told} tokens and named {len(new)}: have it return token ids")
    return new[:first]


def _token_ids(choice: dict[str, Any], answer: dict[str, Any], target: TextModel) -> list[int]:
    """The ids of the generated tokens, in whichever way the server tells them."""
    logprobs = choice.get("logprobs") or {}
    content = [entry.get("id") for entry in logprobs.get("content") or []]
    for found in (choice.get("token_ids"), choice.get("tokens"), answer.get("tokens"), content):
        if found and None not in found:
            return token_ids(found)
    spelled = logprobs.get("tokens")
    if spelled:
        known = target.tokenizer.get_vocab()
        if all(token in known for token in spelled):
            return [int(known[token]) for token in spelled]
        raise EndpointError("endpoint spells tokens otherwise than the target's vocabulary: have it return token ids")
    if not choice.get("text"):
        return []
    raise EndpointError(
        "endpoint returned text without token ids, from which its distribution can't be told: use a server that returns ids "
        "(vLLM: return_token_ids; llama.cpp: logprobs), or --extra with the field that makes it"
    )
