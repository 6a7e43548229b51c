"""What engines refuse, in one way for all of them: prompts, lengths, sequences and tokens that can't be."""

from __future__ import annotations

from collections.abc import Sequence as Many

from torch import Tensor

from outrider.errors import ContextLengthError, ParameterError
from outrider.models.base import LanguageModel, Owned, Sequence


def check_prompt(prompt: Many[int], target: LanguageModel) -> None:
    """Raise `ParameterError` or `ContextLengthError` unless the target can go on from these tokens."""
    if not prompt:
        raise ParameterError("prompt must hold at least one token, got none: give some text")
    wrong = [token for token in prompt if not 0 <= token < target.vocab_size]
    if wrong:
        raise ParameterError(f"prompt tokens must be in 0 … {target.vocab_size - 1}, got {wrong[0]}: wrong tokenizer?")
    if target.max_length is not None and len(prompt) >= target.max_length:
        raise ContextLengthError(
            f"prompt has {len(prompt)} tokens, the context of {target.name} holds {target.max_length} and needs room for "
            "one more: shorten the prompt"
        )


def check_copy(source: Sequence, target: Sequence, length: int) -> None:
    """A copy lengthens `target`, by what `source` holds."""
    if not target.length <= length <= source.length:
        raise ParameterError(f"length must be in {target.length} … {source.length} to copy, got {length}")


def check_places(lengths: Many[int], others: Tensor, places: Many[Many[int]]) -> None:
    """Every alternative stands in the place of an appended token."""
    for count, own in zip(lengths, places, strict=True):
        if len(own) > others.shape[1]:
            raise ParameterError(f"places must be at most {others.shape[1]} a row, one an alternative, got {len(own)}")
        wrong = [place for place in own if not 0 <= place < count]
        if wrong:
            raise ParameterError(f"places must be in 0 … {count - 1}, those of appended tokens, got {wrong[0]}")


def check_alternative(position: int, m: int, length: int, count: int) -> None:
    """There is such an alternative of the last pass, and its position is one that was scored."""
    if not 0 <= m < count:
        raise ParameterError(f"alternative must be one of the {count} of the sequence's last pass, got {m}")
    if not 0 <= position < length:
        raise ParameterError(f"position must be in 0 … {length - 1} for an alternative, got {position}")


def check_truncate(length: int, current: int) -> None:
    """Truncation only shortens."""
    if not 0 <= length <= current:
        raise ParameterError(f"length must be in 0 … {current} to truncate, got {length}: a sequence can't grow this way")


def check_score(name: str, max_length: int | None, sequences: Many[Sequence], lengths: Many[int], width: int) -> None:
    """Every length fits into the tokens given, and every sequence with it into the model's context."""
    for sequence, count in zip(sequences, lengths, strict=True):
        if not 1 <= count <= width:
            raise ParameterError(f"lengths must be in 1 … {width}, got {count}")
        if max_length is not None and sequence.length + count > max_length:
            raise ContextLengthError(
                f"{name} has {max_length} positions, {sequence.length + count} were asked for: "
                "shorten the prompt or lower max_new_tokens"
            )


def owned_sequences(
    model: LanguageModel, kind: type[Owned], sequences: Many[Sequence], lengths: Many[int], width: int
) -> list[Owned]:
    """The sequences, which must be open ones of this model, with room for so many new tokens each."""
    rows: list[Owned] = []
    for sequence in sequences:
        if not isinstance(sequence, kind) or sequence.model is not model or sequence.closed:
            raise ParameterError(f"sequences must be open sequences of {model.name}, got {sequence!r}")
        rows.append(sequence)
    check_score(model.name, model.max_length, rows, lengths, width)
    return rows


def new_tokens(sequences: Many[Sequence], tokens: Tensor, lengths: Many[int], vocab_size: int) -> list[list[int]]:
    """On a CPU: the tokens that each sequence gets, checked. int64 [R, N] → R lists of lengths[i]"""
    if not len(sequences) == len(set(map(id, sequences))) == len(lengths) == len(tokens):
        raise ParameterError("sequences must be different ones, with a row of tokens and a length for each")
    rows = [row[:count] for row, count in zip(tokens.tolist(), lengths, strict=True)]
    for row in rows:
        if row and not 0 <= min(row) <= max(row) < vocab_size:
            raise ParameterError(f"tokens must be in 0 … {vocab_size - 1}, got {min(row)} … {max(row)}")
    return rows
