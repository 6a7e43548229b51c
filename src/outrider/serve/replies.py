"""Answers as OpenAI's clients read them: whole ones, the pieces of a stream, and errors."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import outrider
from outrider.errors import ContextLengthError, ParameterError, in_one_line
from outrider.records import FinishReason
from outrider.results import Result
from outrider.serve.calls import NotServedError
from outrider.support.text import Detokenizer

_REASONS: dict[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "cancelled": "stop",
}
_UNDECODED = "\ufffd"


@dataclass(frozen=True)
class Reply:
    """What all that is sent about one request has in common. chat: of which endpoint. top: as `Call.top`."""

    model: str
    chat: bool
    tokenizer: Any
    top: int | None = None
    token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def whole(self, results: list[Result], prompts: list[list[int]]) -> dict[str, Any]:
        """Of all its texts. prompts: the token ids of each, which have as many texts each."""
        each = len(results) // len(prompts)
        choices = [self._choice(i, result, prompts[i // each]) for i, result in enumerate(results)]
        return {**self._about("text_completion", "chat.completion"), "choices": choices, "usage": usage(results, prompts)}

    def _choice(self, index: int, result: Result, prompt: list[int]) -> dict[str, Any]:
        said: dict[str, Any] = {"text": result.text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
        ids = {"token_ids": result.tokens, "prompt_token_ids": prompt} if self.token_ids else {}
        told = None if self.top is None else (self._content(result) if self.chat else self._columns(result))
        return {"index": index, **said, "logprobs": told, "finish_reason": reason(result), **ids}

    def piece(self, index: int, text: str | None, first: bool = False) -> dict[str, Any]:
        """A piece of one of its texts. first: before there is any. text: None, without any."""
        if not self.chat:
            return self._chunk(index, {"text": text or ""})
        delta = {**({"role": "assistant"} if first else {}), **({} if text is None else {"content": text})}
        return self._chunk(index, {"delta": delta})

    def end(self, index: int, result: Result) -> dict[str, Any]:
        """After the last piece of one of its texts."""
        return self._chunk(index, {"delta": {}} if self.chat else {"text": ""}, reason(result))

    def usage_of(self, results: list[Result], prompts: list[list[int]]) -> dict[str, Any]:
        """What a stream ends with that was asked for it."""
        return {**self._about("text_completion", "chat.completion.chunk"), "choices": [], "usage": usage(results, prompts)}

    def _chunk(self, index: int, said: dict[str, Any], why: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": why}
        return {**self._about("text_completion", "chat.completion.chunk"), "choices": [choice]}

    def _about(self, completion: str, chat: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": chat if self.chat else completion,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"outrider-{outrider.__version__}",
        }

    def _content(self, result: Result) -> dict[str, Any]:
        """Log-probabilities as chats have them."""
        told = []
        for place, (token, logprob) in enumerate(zip(result.tokens, result.logprobs or (), strict=True)):
            others = result.top_logprobs[place] if result.top_logprobs is not None else ()
            told.append({**self._spelled(token, logprob), "top_logprobs": [self._spelled(*other) for other in others]})
        return {"content": told, "refusal": None}

    def _columns(self, result: Result) -> dict[str, Any]:
        """Log-probabilities as completions have them."""
        offsets, at = [], 0
        written = Detokenizer(self.tokenizer, [])
        for token in result.tokens:
            offsets.append(at)
            at += len(written.push(token))
        tops = None
        if result.top_logprobs is not None:
            tops = [{self._spell(token): logprob for token, logprob in top} for top in result.top_logprobs]
        spelled = [self._spell(token) for token in result.tokens]
        return {"tokens": spelled, "token_logprobs": result.logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if self._decoded(token) == text else None}

    def _spell(self, token: int) -> str:
        """Its text, or, where it is a part of a character, its name in the vocabulary: two of them must not look alike."""
        text = self._decoded(token)
        return str(self.tokenizer.convert_ids_to_tokens(token)) if _UNDECODED in text else text

    def _decoded(self, token: int) -> str:
        text: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text


def reason(result: Result) -> str:
    """Why a text ended, in OpenAI's words."""
    return _REASONS[result.finish_reason]


def usage(results: list[Result], prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens read and written; of the drafted ones, in the fields that OpenAI has for predicted output, what was accepted.

    prompts: of each, the token ids.
    """
    read = sum(map(len, prompts))
    written = sum(len(one.tokens) for one in results)
    accepted, drafted = (sum(getattr(one.stats, name) for one in results) for name in ("accepted", "drafted"))
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "completion_tokens_details": details,
    }


def status_of(error: BaseException) -> int:
    """Of HTTP, for what a request failed by: the client's fault, or not."""
    return 400 if isinstance(error, ParameterError) else 500


def error_body(error: BaseException | str, kind: str = "", code: str | None = None) -> dict[str, Any]:
    """As OpenAI's clients read errors."""
    wrong = isinstance(error, ParameterError)
    if isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    return {
        "error": {
            "message": in_one_line(error, 1000),
            "type": kind or ("invalid_request_error" if wrong else "server_error"),
            "param": error.param if isinstance(error, NotServedError) else None,
            "code": code,
        }
    }
