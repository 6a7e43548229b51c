"""What each token of a tokenizer stands for, in bytes: how the tokens of two vocabularies are matched."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

_HEX = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # SentencePiece's


def token_bytes(tokenizer: Any) -> dict[bytes, int]:
    """{bytes: id} of the ordinary tokens. Special tokens and entries that stand for no text are left out."""
    special = set(tokenizer.all_special_ids) | {
        int(i) for i, added in tokenizer.added_tokens_decoder.items() if added.special
    }
    read = spelling(tokenizer)
    found: dict[bytes, int] = {}
    for text, number in sorted(tokenizer.get_vocab().items(), key=lambda item: -item[1]):
        if number not in special:
            raw = read(text)
            if raw:
                found[raw] = int(number)  # the lowest id wins where two entries read alike
    return found


def spelling(tokenizer: Any) -> Callable[[str], bytes | None]:
    """How the entries of this tokenizer's vocabulary are read as bytes."""
    return _from_byte_level if _is_byte_level(tokenizer) else _from_pieces


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the entries are written in GPT-2's alphabet of printable stand-ins for bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)


def _from_byte_level(text: str) -> bytes | None:
    table = _byte_alphabet()
    try:
        return bytes(table[character] for character in text)
    except KeyError:
        return text.encode()  # an added token, written as it is


def _from_pieces(text: str) -> bytes | None:
    match = _HEX.fullmatch(text)
    if match:
        return bytes([int(match.group(1), 16)])
    return text.replace(_SPACE, " ").encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
