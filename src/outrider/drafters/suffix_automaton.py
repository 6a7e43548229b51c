"""A suffix automaton over token ids, grown a token at a time (Blumer et al. 1985).

It recognises every substring of what was appended. A state stands for the substrings that end at the same places; `link`
leads to the longest proper suffix that occurs elsewhere, too. The longest earlier occurrence of the text's end is thus one
link away from the state of the whole text, and appending costs constant time on average, whatever the length of the text.

Most states have a single way out, so it is kept in two arrays, and a dictionary is made for the others only: about 100
bytes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ROOT = 0
_NONE = -1


class SuffixAutomaton:
    """`append` tokens, then ask `occurrence`, or follow tokens of another text with `step`.

    tokens: what was appended, in order.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._length = array("i", [0])  # of the longest substring of each state
        self._link = array("i", [_NONE])
        self._end = array("i", [_NONE])  # the place after the first occurrence
        self._token = array("i", [_NONE])  # the only way out: its token and where it leads
        self._next = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}  # all ways out, of states that have several
        self._last = ROOT
        self._whole: int | None = None  # tokens, while further ones are being added
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add a token at the end. Amortised constant time."""
        self.tokens.append(token)
        new = self._add(self._length[self._last] + 1, len(self.tokens))
        state = self._last
        while state != _NONE and self._way(state, token) == _NONE:
            self._lead(state, token, new)
            state = self._link[state]
        self._link[new] = ROOT if state == _NONE else self._split(state, token)
        self._last = new

    def extend(self, tokens: Iterable[int]) -> None:
        """Add several. If that is interrupted, nothing but `before_interrupt` can be used any more."""
        self._whole = len(self.tokens)
        for token in tokens:
            self.append(token)
        self._whole = None

    def before_interrupt(self) -> array[int] | None:
        """The tokens before an `extend` that did not come to its end; None if every one did."""
        return None if self._whole is None else self.tokens[: self._whole]

    def _split(self, state: int, token: int) -> int:
        """The state for the longest suffix that leads here by `token`, parted from longer substrings if need be."""
        follower = self._way(state, token)
        if self._length[follower] == self._length[state] + 1:
            return follower
        clone = self._add(self._length[state] + 1, self._end[follower])
        self._link[clone] = self._link[follower]
        self._token[clone], self._next[clone] = self._token[follower], self._next[follower]
        if follower in self._more:
            self._more[clone] = dict(self._more[follower])
        while state != _NONE and self._way(state, token) == follower:
            self._lead(state, token, clone)
            state = self._link[state]
        self._link[follower] = clone
        return clone

    def _add(self, length: int, end: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._end.append(end)
        self._token.append(_NONE)
        self._next.append(_NONE)
        return len(self._length) - 1

    def _way(self, state: int, token: int) -> int:
        """Where `token` leads from a state, or -1."""
        more = self._more.get(state)
        if more is not None:
            return more.get(token, _NONE)
        return self._next[state] if self._token[state] == token else _NONE

    def _lead(self, state: int, token: int, target: int) -> None:
        more = self._more.get(state)
        if more is not None:
            more[token] = target
        elif self._next[state] == _NONE or self._token[state] == token:
            self._token[state], self._next[state] = token, target
        else:
            self._more[state] = {self._token[state]: self._next[state], token: target}

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow one token of a text being matched: the state and length of the longest suffix that occurs. → the same

        Begin with (ROOT, 0). Amortised constant time.
        """
        while state != ROOT and self._way(state, token) == _NONE:
            state = self._link[state]
            length = min(length, self._length[state])
        length = min(length, self._length[state])  # a state may have been split since the match was made
        follower = self._way(state, token)
        return (follower, length + 1) if follower != _NONE else (ROOT, 0)

    def occurrence(self, state: int) -> int:
        """The place in `tokens` after the first occurrence of a state's substrings."""
        return self._end[state]

    def end_match(self) -> tuple[int, int]:
        """The longest suffix of `tokens` that occurs earlier, too. → state and length, (ROOT, 0) if none"""
        link = self._link[self._last]
        return (link, self._length[link]) if link > ROOT else (ROOT, 0)
