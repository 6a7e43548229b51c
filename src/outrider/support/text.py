"""Tokens to text as they come: no character is ever split, and generation stops at the first stop string.

A piece of text keeps the number of the token it came from, so that a terminal can colour it by origin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider.errors import ParameterError

_CONTEXT = 6
_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 8  # tokens; more of them undecodable in a row are text in their own right


def check_stop(stop: Sequence[object]) -> None:
    """Raise unless these can be stop strings."""
    if any(not isinstance(text, str) or not text for text in stop):
        raise ParameterError(f"stop must hold strings of at least one character, got {list(stop)!r}")


def check_characters(what: str, text: str) -> None:
    """Raise unless the text is Unicode: strings can hold halves of characters, and bytes that are none, which no tokenizer
    takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"{what} must be Unicode characters (UTF-8), got {text[error.start]!r} at {error.start}, which is none: mend it"
        ) from None


class Detokenizer:
    """Text added by each token, held back while it ends inside a character.

    Tokens are decoded after the last few before them, since many tokenizers drop or add a space at a beginning.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._from = 0
        self._read = len(self._ids)

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._ids.append(token)
        new = self._pending()
        if new.endswith(_INCOMPLETE) and len(self._ids) - self._read < _LONGEST_CHARACTER:
            return ""
        self._from, self._read = self._read, len(self._ids)
        return new

    def flush(self) -> str:
        """What is still held back, replacement characters and all."""
        new = self._pending()
        self._from, self._read = self._read, len(self._ids)
        return new

    def _pending(self) -> str:
        before = self._decode(self._ids[self._from : self._read])
        return self._decode(self._ids[self._from :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class TextTracker:
    """The text of one sequence while it grows: a `StopCheck` for the loop, and the pieces to show.

    Text that may turn out to be the start of a stop string is held back until that is decided. Without stop strings tokens
    are not decoded before somebody wants their text: beside a model's passes that takes several times as long.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        check_stop(stop)
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._anew = partial(TextTracker, tokenizer, prompt, stop)
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._count = 0  # of those that have been decoded
        self._held: deque[tuple[str, int]] = deque()
        self._ready: list[tuple[str, int]] = []
        self._text: list[str] = []
        self._stopped = False
        self._finishing = False
        self._changing = False

    def __call__(self, new: Sequence[int]) -> int | None:
        """Take the round's tokens; how many to keep if a stop string was completed, else None."""
        self._tokens += new
        if not self._stop:
            return None
        before = self._count
        if not self._catch_up():
            return None
        del self._tokens[self._count :]
        return self._count - before

    def take(self) -> list[tuple[str, int]]:
        """The pieces (text, number of the token) that are certain, not taken yet."""
        self._catch_up()
        ready, self._ready = self._ready, []
        return ready

    def finish(self) -> None:
        """No more tokens will come: release everything, unless a stop string ended the text."""
        self._finishing = True
        if self._changing:
            return
        self._catch_up()
        self._changing = True
        if not self._stopped:
            rest = self._detokenizer.flush()
            if not (rest and self._add(rest)):
                self._release(sum(len(text) for text, _ in self._held))
        self._changing = False

    @property
    def text(self) -> str:
        """All that has been released."""
        if self._changing:  # an interrupt came in the middle of a token: all of them once more
            whole = self._anew()
            whole(self._tokens)
            if self._finishing:
                whole.finish()
            return whole.text
        self._catch_up()
        return "".join(self._text)

    def _catch_up(self) -> bool:
        """Decode what has come; whether it completes a stop string."""
        while self._count < len(self._tokens):
            self._changing = True
            piece = self._detokenizer.push(self._tokens[self._count])
            self._count += 1
            found = bool(piece) and self._add(piece)
            self._changing = False
            if found:
                return True
        return False

    def _add(self, piece: str) -> bool:
        """Append a piece; whether it completes a stop string."""
        self._held.append((piece, self._count - 1))
        held = "".join(text for text, _ in self._held)
        found = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._release(min(found))
            self._held.clear()
            self._stopped = True
            return True
        self._release(len(held) - max((_overlap(held, stop) for stop in self._stop), default=0))
        return False

    def _release(self, characters: int) -> None:
        while characters > 0 and self._held:
            text, token = self._held.popleft()
            if len(text) > characters:
                self._held.appendleft((text[characters:], token))
                text = text[:characters]
            characters -= len(text)
            self._ready.append((text, token))
            self._text.append(text)


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
