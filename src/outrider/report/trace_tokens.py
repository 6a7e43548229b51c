"""The tokens of a trace: what each looks like, where it came from, and what was withdrawn in its favour.

Text is found as the stream finds it (`text.Detokenizer`): a character that several tokens spell comes with its last one, the
others show their bytes. What can't be seen or would move other text (control characters, bidirectional overrides) is marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, Literal

from outrider.models.token_bytes import spelling
from outrider.records import Origin, Round
from outrider.support.text import Detokenizer

Kind = Origin | Literal["rejected", "untested", "unused"]
"""An origin, or what became of an offered token that was not kept: rejected; behind a rejected one, so never tested;
accepted behind the end of the sequence."""

MEANING: dict[Kind, str] = {
    "prompt": "given",
    "accepted": "from the draft",
    "lenient": "from the draft, kept by lenience alone: lossy",
    "recovered": "from the target, after a rejection",
    "bonus": "from the target, after a token that had been scored already",
    "target": "from the target, nothing was drafted",
    "rejected": "drafted, refused by the target",
    "untested": "drafted behind a rejected token",
    "unused": "accepted, but behind the end of the text",
}
SINGLE = 240  # prompt tokens shown one by one; what comes before them is shown as text, folded away
MOST_GONE = 8  # drafts of a round, not kept, that stand in the text; the others are counted there, and listed by round
_PIECES = re.compile("(\n|\t|[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb])")
_VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}


@dataclass(frozen=True)
class Mark:
    """A stretch of a token's text. kind: "" (text as it is), newline, tab, control, bytes or special; shown: a stand-in."""

    kind: str
    text: str
    shown: str = ""


@dataclass(frozen=True)
class Token:
    """A token as it is shown.

    visible: its text on one line, spaces marked. position: in the draft, from 1; None where nothing was offered.
    beta: of this position (`Round.betas`). logprob: under the target's raw logits.
    """

    number: int
    kind: Kind
    marks: tuple[Mark, ...]
    visible: str
    blank: bool = False
    position: int | None = None
    beta: float | None = None
    logprob: float | None = None

    @property
    def beta_class(self) -> str:
        """Tenths, for the style sheet."""
        return "" if self.beta is None else f" beta b{round(10 * min(1.0, max(0.0, self.beta)))}"

    @property
    def surprise_class(self) -> str:
        """How unlikely it was, in five steps: p from 0.9, 0.5, 0.1, 0.01, below."""
        if self.logprob is None:
            return ""
        return f" logprob l{sum(exp(self.logprob) < edge for edge in (0.9, 0.5, 0.1, 0.01))}"


@dataclass(frozen=True)
class ShownRound:
    """A round: what was kept before the withdrawn drafts, these, and the token in their place (None: the text ended).

    withdrawn is empty where the record does not hold the drafts; `record.drafted` counts them all the same. further: the
    token after the one in their place, where that was an alternative.
    """

    number: int
    record: Round
    before: tuple[Token, ...]
    withdrawn: tuple[Token, ...]
    last: Token | None
    further: Token | None = None

    @property
    def kept(self) -> tuple[Token, ...]:
        return (*self.before, *(token for token in (self.last, self.further) if token is not None))

    @property
    def offered(self) -> tuple[Token, ...]:
        """The drafted tokens, as far as they are known."""
        return tuple(token for token in self.kept if token.kind == "accepted") + self.withdrawn

    @property
    def from_target(self) -> Token | None:
        """The token that the target added, unless the text ended before it."""
        return next((token for token in self.kept if token.kind != "accepted"), None)

    @property
    def summary(self) -> str:
        """The round in lines: what was drafted and accepted, what it took."""
        record = self.record
        count = len(record.tokens)
        first = f"round {self.number}: {count} token{'s' if count > 1 else ''}"
        drafted = f"{record.accepted} of {record.drafted} accepted, drafted by {record.drafter}"
        if record.alternatives:
            one = "one of them came" if record.taken else "none of them came"
            drafted += f"; {record.alternatives} alternative{'s'[: record.alternatives > 1]} scored beside, {one}"
        times = (f"{phase} {1000 * seconds:.2f} ms" for phase, seconds in record.seconds.items() if seconds)
        return "\n".join([first, drafted if record.drafted else "nothing drafted", ", ".join(times)])

    def about(self, token: Token) -> str:
        """What to say about one of its tokens, in lines."""
        origin = f"{token.kind}: {MEANING[token.kind]}"
        if token.kind == "recovered" and self.withdrawn:
            origin += f", in place of {self.withdrawn[0].visible}"
        lines = [f"{token.visible}    id {token.number}", origin, f"round {self.number}"]
        if self.record.drafter is not None:
            where = f"position {token.position} of {self.record.drafted}, " if token.position is not None else ""
            lines[-1] += f", {where}drafted by {self.record.drafter}"
        if token.beta is not None:
            given = " (given the rejected token)" if token.kind == "untested" else ""
            lines.append(f"β {token.beta:.3f}{given}")
        if token.logprob is not None:
            lines.append(f"log p {token.logprob:.3f}   p {exp(token.logprob):.3g}")
        return "\n".join(lines)


class Vocabulary:
    """What a tokenizer says about single entries."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.spelled = spelling(tokenizer)
        added = {int(i) for i, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        self.special = added | set(tokenizer.all_special_ids)


class TokenReader:
    """The tokens of one sequence as they look, one after the other. before: what precedes them."""

    def __init__(self, vocabulary: Vocabulary, before: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary.tokenizer, before)

    def read(self, number: int, kind: Kind, **known: Any) -> Token:
        """The next token. known: the further fields of `Token`."""
        text = self._detokenizer.push(number)
        marks = self._marks(number, text)
        visible = "".join(_VISIBLE.get(c, c) for m in marks for c in (m.shown or m.text))
        blank = bool(text) and not text.strip(" ")
        return Token(number, kind, marks, visible, blank, **known)

    def _marks(self, number: int, text: str) -> tuple[Mark, ...]:
        special = number in self._vocabulary.special
        if text and not special:
            return tuple(split(text))
        entry = self._vocabulary.tokenizer.convert_ids_to_tokens(number)
        if entry is None:
            return (Mark("special", "", f"no token {number}"),)  # an entry that pads the embeddings
        raw = None if special else self._vocabulary.spelled(entry)
        if raw is None:
            return (Mark("special", "", "".join(m.shown or m.text for m in split(entry))),)
        try:
            return tuple(split(raw.decode()))  # a tokenizer that drops a space, say
        except UnicodeDecodeError:
            return (Mark("bytes", "", raw.hex(" ").upper()),)


def split(text: str) -> Iterator[Mark]:
    """Text into stretches that can be shown as they are, and those that need a stand-in."""
    for piece in _PIECES.split(text):
        if piece == "\n":
            yield Mark("newline", piece, "↵")
        elif piece == "\t":
            yield Mark("tab", piece, "⇥")
        elif _PIECES.fullmatch(piece):
            yield Mark("control", "", f"U+{ord(piece):04X}")
        elif piece:
            yield Mark("", piece)


def shown_prompt(tokenizer: Any, prompt: Sequence[int]) -> tuple[list[Mark], list[Token]]:
    """The prompt: text of what lies far back, the last tokens one by one."""
    early, late = prompt[:-SINGLE], prompt[-SINGLE:]
    text = tokenizer.decode(list(early), clean_up_tokenization_spaces=False) if early else ""
    reader = TokenReader(Vocabulary(tokenizer), early)
    return list(split(text)), [reader.read(number, "prompt") for number in late]


def shown_rounds(tokenizer: Any, prompt: Sequence[int], rounds: Sequence[Round]) -> list[ShownRound]:
    """The rounds of one sequence, their tokens ready to be shown."""
    vocabulary = Vocabulary(tokenizer)
    reader = TokenReader(vocabulary, prompt)
    known = list(prompt)
    shown = []
    for number, record in enumerate(rounds, 1):
        kept = [reader.read(token, kind, **_facts(record, i)) for i, (token, kind) in enumerate(_origins(record))]
        withdrawn = _withdrawn(vocabulary, known, record)
        known += record.tokens
        last, further = ([*kept[record.accepted :], None, None])[:2]
        shown.append(ShownRound(number, record, tuple(kept[: record.accepted]), withdrawn, last, further))
    return shown


def _origins(record: Round) -> Iterator[tuple[int, Origin]]:
    return zip(record.tokens, record.origins, strict=True)


def _facts(record: Round, i: int) -> dict[str, Any]:
    offered = _offer(record, i) if i < record.tested else {}  # beyond, something followed another token than this one did
    return {**offered, "logprob": record.logprobs[i] if record.logprobs else None}


def _offer(record: Round, i: int) -> dict[str, Any]:
    """Position and beta of the i-th token of a round, if anything was offered there."""
    if i >= record.drafted:
        return {}
    return {"position": i + 1, "beta": record.betas[i] if record.betas else None}


def _withdrawn(vocabulary: Vocabulary, before: Sequence[int], record: Round) -> tuple[Token, ...]:
    """The offered tokens that were not kept, as they would have followed the accepted ones."""
    kept = min(record.accepted, len(record.tokens))
    if record.drafts is None or kept == record.drafted:
        return ()
    reader = TokenReader(vocabulary, [*before[-64:], *record.drafts[:kept]])
    found = []
    for i in range(kept, record.drafted):
        kind: Kind = "unused" if i < record.accepted else "rejected" if i == record.accepted else "untested"
        found.append(reader.read(record.drafts[i], kind, **_offer(record, i)))
    return tuple(found)
