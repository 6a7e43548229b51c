"""How an example of a task is put to a model, and where its answer ends."""

from __future__ import annotations

from outrider.bench.examples import Example, TaskKind
from outrider.errors import ParameterError
from outrider.models.base import TextModel, has_encoder
from outrider.request.prompts import Asked, as_said, asked, encode, has_template


def asked_of(target: TextModel, kind: TaskKind, example: Example) -> Asked:
    """An example as this model is asked it. An encoder reads the bare text: such models are made for a task."""
    return prompt_tokens(target, kind, example) if example.audio is None else asked(target, example.audio)


def prompt_tokens(target: TextModel, kind: TaskKind, example: Example) -> list[int]:
    """The same, of text. Raises `ParameterError` for a recording."""
    if example.audio is not None:
        return encode(target, example.audio)
    if not example.prompt:
        return _beginning(target)
    if example.chat and has_template(target):
        assert kind.chat is not None
        return encode(target, as_said(target, kind.chat.format(example.prompt)))
    return encode(target, example.prompt if has_encoder(target) else kind.raw.format(example.prompt))


def stops(target: TextModel, kind: TaskKind, example: Example) -> tuple[str, ...]:
    """Where an answer ends, beside the model's own end: a model that takes messages knows it."""
    if has_encoder(target):
        return ()
    return () if example.chat and has_template(target) else kind.stop


def _beginning(target: TextModel) -> list[int]:
    tokenizer = target.tokenizer
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [int(token)]
    raise ParameterError(f"{target.name} has no token that begins a text, which task lm1b needs")
