"""Prompts to token ids.

For an encoder-decoder the prompt is the *source*, what its encoder reads (or hears); its decoder begins with tokens that
the model's configuration fixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import Tensor

from outrider.audio import Audio, features
from outrider.errors import ParameterError, in_one_line
from outrider.models.base import Source, TextModel, has_encoder
from outrider.support.text import check_characters

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message] | Audio
"""Text as it is, token ids, chat messages ({"role": …, "content": …}) for the model's chat template, or a recording."""
Asked = list[int] | Audio
"""A prompt as a model reads it, or hears it."""


@dataclass(frozen=True)
class Prepared:
    """A prompt as the loop takes it. tokens: what the sequence begins with. source: what an encoder reads, if it has one."""

    tokens: list[int]
    source: Source | None = None


def prepare(target: TextModel, prompt: Prompt) -> Prepared:
    """A prompt for the loop, for models with and without an encoder."""
    if not has_encoder(target):
        return Prepared(encode(target, prompt))
    from outrider.models.decoder_rules import decoder_prefix
    from outrider.models.encoder_decoder import EncoderDecoderModel

    assert isinstance(target, EncoderDecoderModel)
    read = asked(target, prompt)
    if isinstance(read, Audio):
        heard = features(target, read)
        return Prepared(decoder_prefix(target, heard, read.language, read.task), heard)
    return Prepared(decoder_prefix(target, read), read)


def _with_text(one: Any) -> Any:
    """A message whose content is text, parts of text joined by line breaks. Raises for one without any: templates have their
    own words for that, and some write down whatever there is.
    """
    content = one.get("content") if isinstance(one, Mapping) else None
    if isinstance(content, list | tuple) and content:
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = "\n".join(map(str, texts))
    if isinstance(content, str):
        check_characters("message", content)
        return {**one, "content": content}
    if isinstance(one, Mapping) and content is None and one.keys() - {"role", "content"}:
        return one  # calls of tools
    got = type(content).__name__ if isinstance(one, Mapping) and "content" in one else repr(one)
    raise ParameterError(f'messages must be {{"role": …, "content": text, or parts of text}}, got {got:.60}')


def has_template(target: TextModel) -> bool:
    """Whether a model takes chat messages."""
    return bool(getattr(getattr(target, "tokenizer", None), "chat_template", None))  # token ids need no tokenizer


def as_said(target: TextModel, text: str, chat: bool | None = None) -> str | list[Message]:
    """Text as it is, or as what a user says, for the chat template; None: if the model has one."""
    return [{"role": "user", "content": text}] if (has_template(target) if chat is None else chat) else text


def source_length(source: Source | None) -> int | None:
    """The tokens of a source that is text."""
    return None if source is None or isinstance(source, Tensor) else len(source)


def asked(target: TextModel, prompt: Prompt) -> Asked:
    """Token ids of a prompt, or the recording that a model which hears is to hear."""
    if isinstance(prompt, Audio) and getattr(target, "hears", False):
        return prompt
    return encode(target, prompt)


def encode(target: TextModel, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: chat messages through the chat template, text with the tokenizer's own special tokens.

    For an encoder-decoder these are the source's.
    """
    tokenizer: Any = getattr(target, "tokenizer", None)  # token ids need none
    hears = getattr(target, "hears", False)
    if hears or isinstance(prompt, Audio):
        how = 'give it outrider.read_wav(FILE), on the command line audio, or prompts with lines of {"audio": FILE.wav}'
        what = f"hears audio and reads no text: {how}" if hears else "reads text, not audio"
        raise ParameterError(f"{target.name} {what}")
    if isinstance(prompt, str):
        if not prompt:
            raise ParameterError("prompt must not be empty: give some text")
        check_characters("prompt", prompt)
        return [int(token) for token in tokenizer.encode(prompt)]
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        how = "use .tolist() for one row of ids" if hasattr(prompt, "tolist") else "decode bytes to text first"
        raise ParameterError(
            f"prompt must be text, a list of token ids or of chat messages, got {type(prompt).__name__}"
            + (f": {how}" if hasattr(prompt, "tolist") or isinstance(prompt, bytes | bytearray) else "")
        )
    items = list(prompt)
    if not items:
        raise ParameterError("prompt must hold at least one token, got none: give some text")
    if isinstance(items[0], Mapping):
        if not has_template(target):
            raise ParameterError(f"{target.name} has no chat template: give the prompt as text (raw)")
        items = [_with_text(one) for one in items]
        try:
            ids = tokenizer.apply_chat_template(items, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # whatever a template, which is the model's own program, may raise
            reason = in_one_line(error, 200)
            raise ParameterError(f"messages don't fit the chat template of {target.name}: {reason}") from error
        return [int(token) for token in ids]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in items):
        raise ParameterError("prompt must be text, token ids or chat messages")
    return [int(token) for token in items if isinstance(token, Integral)]
