"""Requests to answers: what the server does with a call, whatever brought it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import outrider
from outrider import structured
from outrider.batch.answer import Answer
from outrider.batch.continuous import ContinuousBatch
from outrider.batch.run import Tally
from outrider.errors import ContextLengthError, OutriderError
from outrider.request.prompts import encode
from outrider.sampling.stateful import Constraint
from outrider.serve.calls import Call, NotServedError, Structured

LONGEST = 256  # characters of a token: in the vocabularies there are the longest have 128
_KEPT = 64  # constraints: requests that name the same share one, and so a decoder


class BusyError(OutriderError):
    """More requests are waiting than there may be."""


class EndingError(OutriderError):
    """The server ends."""

    def __init__(self) -> None:
        super().__init__("the server ends, and this text with it: ask another one, or again later")


@dataclass(frozen=True, eq=False)
class Asked:
    """What a call has become. prompts: of each, the token ids. answers: to the first prompt, to the next, …"""

    prompts: list[list[int]]
    answers: list[Answer]

    def cancel(self) -> None:
        """Nobody wants them any more."""
        for answer in self.answers:
            answer.cancel()


def not_served(service: Service, model: str) -> NotServedError:
    """Of a request for another model."""
    return NotServedError(f"model {model!r} is not served: name {service.names[0]!r}, or leave it out", "model")


class Service:
    """A model, its batch, and what it has done.

    names: what the model may be called in requests, the first in answers. most_tokens: of a text. most_waiting: texts that
    have no place in the batch yet.
    """

    def __init__(
        self, batch: ContinuousBatch, names: list[str], most_tokens: int, batch_size: int, most_waiting: int
    ) -> None:
        self.batch, self.names, self.most_tokens = batch, names, most_tokens
        self._most = batch_size + most_waiting
        self._constraints: OrderedDict[Structured, Constraint] = OrderedDict()
        self._lock = threading.Lock()
        self._under_way: set[Asked] = set()
        self._ending = False
        self.tally = Tally()
        self.refused = 0

    @property
    def target(self) -> Any:
        return self.batch.target

    def submit(self, call: Call) -> Asked:
        """Let a call's texts join, or wait. Reads its prompts, so not for a thread that serves others.

        Raises `OutriderError`s for what is wrong with it.
        """
        if call.model is not None and call.model not in self.names:
            raise not_served(self, call.model)
        if self.batch.load + call.texts > self._most:
            raise BusyError(f"{self.batch.load} texts are being written or waited for: try again later")
        for prompt in call.prompts:
            self._check_size(prompt)
        prompts = [encode(self.target, prompt) for prompt in call.prompts]
        more: dict[str, Any] = {}
        if call.structured:
            more["processors"] = tuple(map(self._constraint, call.structured))
        asked = Asked(prompts, [])
        try:
            for ids in prompts:
                for number in range(call.count):
                    asked.answers.append(self.batch.submit(ids, **call.options_of(number), **more))
        except BaseException:
            asked.cancel()
            raise
        self._under_way.add(asked)
        if self._ending:
            self.leave(asked)
        return asked

    def leave(self, asked: Asked) -> None:
        """It has been answered, or nobody wants it any more."""
        asked.cancel()
        self._under_way.discard(asked)

    def end(self) -> None:
        """Cancel what is under way, and what may still come."""
        self._ending = True
        for asked in list(self._under_way):
            asked.cancel()

    def _check_size(self, prompt: Any) -> None:
        """Raise for what can't fit whatever its tokens are, before minutes are spent on finding these."""
        limit, texts = self.target.max_length, [prompt] if isinstance(prompt, str) else []
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            texts = [one["content"] for one in prompt if isinstance(one.get("content"), str)]
        size = sum(map(len, texts))
        if limit is not None and size > limit * LONGEST:
            raise ContextLengthError(
                f"prompt has {size} characters, the context of {self.target.name} holds {limit} tokens: shorten it"
            )

    def _constraint(self, wanted: Structured) -> Constraint:
        with self._lock:  # compiling the same for two would make two
            made = self._constraints.pop(wanted, None)
            if made is None:
                make = {"json_schema": structured.json_schema, "regex": structured.regex, "grammar": structured.grammar}
                made = make[wanted.kind](self.target, wanted.text)
            self._constraints[wanted] = made
            while len(self._constraints) > _KEPT:
                self._constraints.popitem(last=False)
            return made

    def count(self, result: outrider.Result) -> None:
        """A text that has been answered. Raises `EndingError` for one that was cut short."""
        if result.finish_reason == "cancelled":
            raise EndingError
        self.tally.add(result.to_dict())

    def told(self) -> str:
        """What has been done, in a line."""
        tally = self.tally
        a_round = f", {tally.tokens / tally.rounds:.2f} a round" if tally.rounds else ""
        texts = f"{tally.prompts} text{'' if tally.prompts == 1 else 's'} of {tally.tokens} tokens"
        return f"{texts}{a_round}; requests answered by an error: {self.refused}"

    def metrics(self) -> str:
        """What has been done, as Prometheus reads it."""
        tally = self.tally
        found = {
            "texts_total": ("counter", "Texts that were answered.", tally.prompts),
            "refused_total": ("counter", "Requests that were answered by an error.", self.refused),
            "prompt_tokens_total": ("counter", "Tokens of their prompts.", tally.prompt_tokens),
            "cached_prompt_tokens_total": (
                "counter",
                "Of these, those that had been read for others before.",
                tally.cached_tokens,
            ),
            "generated_tokens_total": ("counter", "Tokens of these texts.", tally.tokens),
            "rounds_total": ("counter", "Passes of the target, text by text.", tally.rounds),
            "drafted_tokens_total": ("counter", "Tokens that drafts offered.", tally.drafted),
            "tested_tokens_total": ("counter", "Of these, those that the rule decided about.", tally.tested),
            "accepted_tokens_total": (
                "counter",
                "Of these, those that it accepted: alpha is accepted over tested.",
                tally.accepted,
            ),
            "load": ("gauge", "Texts that are being written or waited for.", self.batch.load),
        }
        lines = []
        for name, (kind, what, value) in found.items():
            lines += [f"# HELP outrider_{name} {what}", f"# TYPE outrider_{name} {kind}", f"outrider_{name} {value}"]
        return "\n".join(lines) + "\n"
