"""Prompts to token ids, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.errors import ParameterError
from outrider.models.base import TextModel

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text as it is, token ids, or chat messages ({"role": …, "content": …}) for the model's chat template."""


def encode(target: TextModel, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: chat messages through the chat template, text with the tokenizer's own special tokens."""
    tokenizer = target.tokenizer
    if isinstance(prompt, str):
        if not prompt:
            raise ParameterError("prompt must not be empty: give some text")
        return [int(token) for token in tokenizer.encode(prompt)]
    items = list(prompt)
    if items and isinstance(items[0], Mapping):
        if not getattr(tokenizer, "chat_template", None):
            raise ParameterError(f"{target.name} has no chat template: give the prompt as text, or --raw")
        ids = tokenizer.apply_chat_template(items, add_generation_prompt=True, return_dict=False)
        return [int(token) for token in ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in items):
        raise ParameterError("prompt must be text, token ids or chat messages")
    return [int(token) for token in items if isinstance(token, int)]


def end_tokens(target: TextModel) -> frozenset[int]:
    """The tokens that end a sequence: the generation config's, and the tokenizer's (which chat templates rely on)."""
    own = getattr(target.tokenizer, "eos_token_id", None)
    return target.end_tokens | (frozenset() if own is None else {own})
