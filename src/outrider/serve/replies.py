"""Answers as OpenAI's clients read them: whole ones, the chunks of a stream, and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import outrider
from outrider.errors import ContextLengthError, ParameterError, in_one_line
from outrider.pieces import Piece
from outrider.records import FinishReason, TopLogprobs
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
        told = Told(self).of(result.tokens, result.logprobs, result.top_logprobs)
        return {"index": index, **said, "logprobs": told, "finish_reason": reason(result), **ids}

    def usage_of(self, results: list[Result], prompts: list[list[int]]) -> dict[str, Any]:
        """What a stream ends with that was asked for it."""
        return {**self._about("text_completion", "chat.completion.chunk"), "choices": [], "usage": usage(results, prompts)}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """One of a stream."""
        return {**self._about("text_completion", "chat.completion.chunk"), "choices": [choice]}

    def _about(self, completion: str, chat: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.number}",
            "object": chat if self.chat else completion,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"outrider-{outrider.__version__}",
        }

    def spelled(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if self._decoded(token) == text else None}

    def spell(self, token: int) -> str:
        """Its text, or, where it is a part of a character, its name in the vocabulary: two of them must not look alike."""
        text = self._decoded(token)
        return str(self.tokenizer.convert_ids_to_tokens(token)) if _UNDECODED in text else text

    def _decoded(self, token: int) -> str:
        text: str = self.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text


class Told:
    """What is told of a text's tokens, part by part: their log-probabilities, in the form of the endpoint."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._written = Detokenizer(reply.tokenizer, [])
        self._at = 0  # characters

    def of(self, tokens: Many[int], logprobs: Many[float] | None, tops: Many[TopLogprobs] | None) -> dict[str, Any] | None:
        """Of the next tokens; None if nothing was asked for."""
        if self._reply.top is None or logprobs is None:
            return None
        return self._content(tokens, logprobs, tops) if self._reply.chat else self._columns(tokens, logprobs, tops)

    def _content(self, tokens: Many[int], logprobs: Many[float], tops: Many[TopLogprobs] | None) -> dict[str, Any]:
        """As chats have them."""
        spelled, told = self._reply.spelled, []
        for place, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            others = () if tops is None else tops[place]
            told.append({**spelled(token, logprob), "top_logprobs": [spelled(*other) for other in others]})
        return {"content": told, "refusal": None}

    def _columns(self, tokens: Many[int], logprobs: Many[float], tops: Many[TopLogprobs] | None) -> dict[str, Any]:
        """As completions have them."""
        spell, offsets = self._reply.spell, []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._written.push(token))
        told = None if tops is None else [{spell(token): logprob for token, logprob in top} for top in tops]
        return {
            "tokens": [spell(token) for token in tokens],
            "token_logprobs": list(logprobs),
            "top_logprobs": told,
            "text_offset": offsets,
        }


class Streamed:
    """The chunks of one text. prompt: its token ids."""

    def __init__(self, reply: Reply, index: int, prompt: list[int]) -> None:
        self._reply, self._index, self._prompt = reply, index, prompt
        self._told = Told(reply)
        self._count = 0  # tokens that were told

    def begin(self) -> dict[str, Any]:
        """Before there is any text."""
        said = {"delta": {"role": "assistant", "content": ""}} if self._reply.chat else {"text": ""}
        ids = {"token_ids": [], "prompt_token_ids": self._prompt} if self._reply.token_ids else {}
        return self._reply.chunk({"index": self._index, **said, "logprobs": None, "finish_reason": None, **ids})

    def piece(self, piece: Piece) -> dict[str, Any]:
        """A piece of it."""
        said = {"delta": {"content": str(piece)}} if self._reply.chat else {"text": str(piece)}
        return self._chunk(said, None, piece.tokens, piece.logprobs, piece.top_logprobs)

    def end(self, result: Result) -> dict[str, Any]:
        """After the last piece."""
        rest = slice(self._count, None)
        logprobs, tops = result.logprobs and result.logprobs[rest], result.top_logprobs and result.top_logprobs[rest]
        said: dict[str, Any] = {"delta": {}} if self._reply.chat else {"text": ""}
        return self._chunk(said, reason(result), result.tokens[rest], logprobs, tops)

    def _chunk(
        self,
        said: dict[str, Any],
        why: str | None,
        tokens: Many[int],
        logprobs: Many[float] | None,
        tops: Many[TopLogprobs] | None,
    ) -> dict[str, Any]:
        self._count += len(tokens)
        told = self._told.of(tokens, logprobs, tops) if tokens else None
        ids = {"token_ids": list(tokens)} if self._reply.token_ids else {}
        return self._reply.chunk({"index": self._index, **said, "logprobs": told, "finish_reason": why, **ids})


def reason(result: Result) -> str:
    """Why a text ended, in OpenAI's words."""
    return _REASONS[result.finish_reason]


def usage(results: list[Result], prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens read (of each prompt's first answer, those that were read for others before) and written; of the drafted ones,
    in the fields that OpenAI has for predicted output, what was accepted.

    prompts: of each, the token ids.
    """
    read = sum(map(len, prompts))
    each = len(results) // len(prompts)
    cached = sum(one.cached_tokens for one in results[::each])
    written = sum(len(one.tokens) for one in results)
    accepted, drafted = (sum(getattr(one.stats, name) for one in results) for name in ("accepted", "drafted"))
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
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
